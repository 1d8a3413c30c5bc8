"""Tells what happens in a run of planning mode."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio

from replanning import Environment, Plan, PlanRun, ReplanningError, Settings
from replanning.cli.display import Display, create_display, create_gate
from replanning.cli.lookup import open_store, store_may_exist
from replanning.cli.narrator import Line
from replanning.cli.options import ExitCode
from replanning.cli.output import escape_control, print_json, print_message
from replanning.cli.runner import (
    ContextShell,
    RunOptions,
    _find_run,
    _load_run_details,
    discover_tools,
    parse_context_options,
    report_run,
    stop_signals,
)
from replanning.cli.setup import (
    FORGES,
    IssueNotifier,
    delivery_problems,
    open_notifiers,
    open_trace_exporter,
    read_settings,
    trace_location,
)
from replanning.cli.summary import RunSummary, summary_json
from replanning.cli.task import SolveRequest
from replanning.errors import NotRunning, Problem, SettingsError, StoreError
from replanning.history.wording import HELD_FAILURE_TYPE
from replanning.journal import AttemptFailed, PlanningNoted, RunOpened, RunStore, TriggerEvent
from replanning.journal.records import Record
from replanning.live.states import TaskState
from replanning.llm import LLMProvider
from replanning.llm.quoting import truncate_text
from replanning.llm.selection import AUTO, create_llm_provider
from replanning.plan import JsonObject
from replanning.plan.messages import brief_repr
from replanning.plan.redaction import Redactor
from replanning.plan.types import JsonValue, RunId, TaskId
from replanning.planning import (
    PlanningCoordinator,
    PlanningHistoryExporter,
    PlanningHistoryStore,
    Steering,
    TaskRequest,
    request_of,
)
from replanning.planning.steering import Issue
from replanning.planning.tasks import describe_tool_use, is_tool_loop, phase_of
from replanning.run.opening import redactor_for
from replanning.tools import ToolExecutor

if TYPE_CHECKING:
    from replanning.live.entries import TaskEntry
    from replanning.live.plan import LivePlan


_MAX_DETAIL_CHARS: Final = 300
"""Characters of an error, or of what somebody said, that are shown beside a decision."""


def planning_listener(display: Display) -> Callable[[object], None]:
    """Shows what happens: phases and decisions in words, everything else as for every run."""
    held: set[str] = set()  # tasks that wait for a person: that is how they end, but no failure to tell people of

    def tell(event: object) -> None:
        if isinstance(event, AttemptFailed) and event.failure.type == HELD_FAILURE_TYPE:
            held.add(event.task)
        elif isinstance(event, TriggerEvent) and event.kind == "task-failed" and held.issuperset(event.tasks):
            return
        elif not isinstance(event, PlanningNoted):
            display.on_event(event)
        elif text := _note_text(event.type, event.data):
            display.show_note(Line("◆", escape_control(text), "cyan"))

    return tell


def _note_text(kind: str, data: JsonObject) -> str:
    value, record = data.get("value"), data.get("record")
    match kind:
        case "output" if isinstance(value, dict):
            return _phase_outcome(str(data.get("phase")), value)
        case "replan" if isinstance(record, dict) and record.get("replan_type") != "none":
            return (
                f"{record.get('phase')}: {record.get('replan_type')} {_replan_outcome(record, data.get('considered'))}"
            )
        case "replan" if isinstance(record, dict):
            return _kept_plan_text(record)
        case "assumed":
            found = data.get("assumptions")
            return f"assumed: {'; '.join(map(str, found))}" if isinstance(found, list) else ""
        case "held":
            return f"waits for a person: {' '.join(str(data.get('text')).split())}"
    return ""


def _replan_outcome(record: JsonObject, considered: JsonValue) -> str:
    """What became of a decision to replan."""
    if record.get("result") == "failure":
        return f"came to nothing ({truncate_text(str(record.get('error')), _MAX_DETAIL_CHARS)})"
    if not record.get("executed"):
        return f"decided, not executed ({record.get('reason')})"
    ruling = considered.get("ruling") if isinstance(considered, dict) else None
    warned = isinstance(ruling, dict) and ruling.get("kind") == "execute_with_warning"
    return f"decided, executed with a warning ({record.get('reason')})" if warned else "decided, executed"


def _kept_plan_text(record: JsonObject) -> str:
    """That what somebody has said changes nothing, and why; empty where nobody has."""
    cause, decision = _as_object(record.get("cause")), _as_object(record.get("llm_decision"))
    if not cause.get("error") or cause.get("action"):
        return ""
    why, said = decision.get("reasoning") or record.get("reason"), truncate_text(str(cause["error"]), _MAX_DETAIL_CHARS)
    return f"{record.get('phase')}: the plan stays as it is ({said}): {why}"


def _phase_outcome(phase: str, value: JsonObject) -> str:
    actions, subtasks = value.get("action_plan"), value.get("subtasks")
    if isinstance(actions, dict) and isinstance(planned := actions.get("actions"), list):
        return f"{phase}: {len(planned)} action{'s' * (len(planned) != 1)}"
    if isinstance(subtasks, list):
        return f"{phase}: {len(subtasks)} subtask{'s' * (len(subtasks) != 1)}"
    call = value.get("function_call")
    if isinstance(call, dict):  # without planning, where the tool stands in no plan
        said = f"{value['comment']}: " if value.get("comment") else ""
        return f"{phase}: {said}{call.get('name')} {brief_repr(call.get('arguments'))}"
    return f"{phase}: {value.get('main_objective') or value.get('comment') or _goal_outcome(value)}"


def _goal_outcome(value: JsonObject) -> str:
    summary = value.get("summary")
    if isinstance(summary, dict):
        return "the goal was achieved" if summary.get("goal_achieved") else "the goal was not achieved"
    return "it could not be judged" if "not_judged" in value else "done"


def separate_phases(document: JsonObject, live: LivePlan) -> JsonObject:
    """How a run came out, for programs: its actions as tasks with their outputs, and its phases by themselves."""
    outputs, tasks = _as_object(document["outputs"]), _as_object(document["tasks"])
    phases = {entry.id: entry for entry in live if phase_of(entry.task) is not None}
    actions = {
        root: output for root, output in outputs.items() if not _belongs_to_phase(live.entry(TaskId(root)), live)
    }
    return {
        **document,
        "outputs": actions,
        "tasks": {task: state for task, state in tasks.items() if task not in phases},
        "phases": [_phase_json(entry) for entry in phases.values()],
    }


def _phase_json(entry: TaskEntry) -> JsonObject:
    return {
        "task": entry.id,
        "phase": str(phase_of(entry.task)),
        "state": str(entry.state),
        "output": entry.output if entry.state is TaskState.DONE else None,
    }


def _belongs_to_phase(entry: TaskEntry, live: LivePlan) -> bool:
    """Whether a task is a phase, or phases that plan anew have taken its place: then its result is theirs."""
    parts = [live.entry(task_id) for task_id in entry.replaced_by]
    return any(_belongs_to_phase(part, live) for part in parts) if parts else phase_of(entry.task) is not None


def _as_object(value: JsonValue) -> JsonObject:
    return value if isinstance(value, dict) else {}


REPLY_HINT: Final = (
    "*Reply below to answer what is unclear. What needs your agreement takes `{0}approve` or `{0}reject` at the beginning of"
    " a comment; `{0}replan` and why asks for another plan.*"
)
"""How people answer below an issue that is read while the run goes on."""


def accepts_comments(options: RunOptions) -> bool:
    """Whether people can answer below an issue."""
    return options.ask != "never" and any(target.partition("=")[0] in FORGES for target in options.notify)


def create_steerings(
    planning: PlanningCoordinator, known: Sequence[str] | None, tell: Callable[[str], None]
) -> list[Steering]:
    """Who reads what people write: one for each issue that a run is told of on.

    Args:
        planning: whose run is steered.
        known: the comments that the request has already; None where it has none, so that all that are there count as
            known.
        tell: is given what became of comments.
    """
    found: list[Steering] = []
    for exporter in planning.engine.exporters:
        if isinstance(exporter, IssueNotifier) and isinstance(exporter.forge, Issue):
            exporter.hint = REPLY_HINT.format(exporter.forge.command)
            found.append(Steering(planning, exporter.forge, handled=known, on_message=tell))
    return found


_MAX_OBJECTIVE_CHARS = 100
"""Characters of another run's goal that are told."""

_UNFINISHED_STATUSES = ("paused", "needs_human", "running")


def create_history_exporter(settings: Settings) -> PlanningHistoryExporter:
    """Writes the planning history of runs where the settings say."""
    return PlanningHistoryExporter(PlanningHistoryStore(settings.planning.history.directory))


def with_past_executions(request: TaskRequest, settings: Settings) -> TaskRequest:
    """A request with what was planned and done before about the same issue."""
    if not request.issue_id or request.earlier:
        return request
    try:
        past = PlanningHistoryStore(settings.planning.history.directory).get_past_executions_for_issue(request.issue_id)
    except StoreError as error:
        print_message(f"note: nothing is known of earlier runs of {request.issue_id}: {error}")
        return request
    return request.model_copy(update={"earlier": tuple(past)})


def find_unfinished_run(request: TaskRequest, settings: Settings, store: RunStore) -> str | None:
    """The last run of the same issue, where it is not finished: its plan is continued, and not made again."""
    if not request.issue_id:
        return None
    known = {str(info.run): info.status for info in store.runs()}
    past = [str(one["task_uuid"]) for one in with_past_executions(request, settings).earlier]
    last = next((run for run in reversed(past) if run in known), None)
    return last if last is not None and known[last] in _UNFINISHED_STATUSES else None


def check_continuable(run_id: str, request: TaskRequest, settings: Settings, store: RunStore) -> None:
    """Take a run that is to be continued for what is wanted only where it is about that.

    Raises:
        SettingsError: there is a run of that name, and it is about something else.
        NotRunning: it was given up, and nothing more will come of it.
    """
    info = next((info for info in store.runs() if info.run == run_id), None)
    if info is None:
        return
    opened = next(iter(store.read(RunId(run_id)))).body
    if not isinstance(opened, RunOpened):
        return
    known, redactor = request_of(opened.plan), redactor_for(settings)  # what is kept of a goal holds no secrets
    if known is not None and _is_same_request(known, request, redactor):
        if info.status == "aborted":
            ways = f"another --run-id solves the goal anew; `replanning why {run_id}` says what was in the way"
            raise NotRunning(f"run {run_id!r} is over: it was aborted; {ways}")
        return
    about = f"{opened.plan.goal.objective[:_MAX_OBJECTIVE_CHARS]!r}{'' if known else ', and no run of planning mode'}"
    ways = f"`replanning resume {run_id}` goes on with it, another --run-id begins another run"
    raise SettingsError([Problem("--run-id", f"there is a run {run_id!r} already, about {about}: {ways}")])


def _is_same_request(known: TaskRequest, wanted: TaskRequest, redactor: Redactor) -> bool:
    same_issue = bool(known.issue_id) and known.issue_id == wanted.issue_id
    return same_issue or redactor.text(known.goal.objective) == redactor.text(wanted.goal.objective)


def record_completion(run: PlanRun, settings: Settings, store: RunStore, environment: Environment) -> None:
    """Say that a run is over whose journal is not kept, since nobody can go on with it."""
    request = request_of(run.live.plan)
    if store.durable or run.result.status in ("succeeded", "failed", "aborted") or request is None:
        return
    history = PlanningHistoryStore(
        settings.planning.history.directory,
        task_uuid=run.id,
        issue_id=request.issue_id,
        environment=environment,
    )
    said: JsonObject = {"phase": "completion", "status": "planned" if history.has_plan() else "given_up"}
    try:
        history.save_completion({**said, "result": run.result.status, "reason": run.result.reason})
    except StoreError as error:
        print_message(f"note: {error}")


_MODEL_NOTE: Final = "model"
"""What is noted of a run whose language model the command line names."""


def solve(task: SolveRequest, options: RunOptions, *, run_id: str | None = None) -> int:
    """Take a goal to its end, print how it came out, and return the exit code.

    Raises:
        ReplanningError: it cannot be started.
    """
    settings = read_settings(options.settings, quiet=options.quiet)
    run, named = _existing_run(task.request, run_id, settings, options.store)

    def start(planning: PlanningCoordinator) -> Awaitable[object]:
        return planning.execute_with_planning(run)

    return _solve_and_report(replace(task, llm=task.llm or named), options, settings, start)


def _existing_run(
    request: TaskRequest, run_id: str | None, settings: Settings, place: str
) -> tuple[str | None, str | None]:
    """The run that is meant, where one is, and the language model that was named for it, where it has begun.

    Raises:
        SettingsError: the run of that name is about something else.
        NotRunning: it was given up.
        StoreError: its store cannot be read.
    """
    if not store_may_exist(place):
        return run_id, None
    store = open_store(place)
    try:
        if run_id is not None:
            check_continuable(run_id, request, settings, store)
        run = run_id or find_unfinished_run(request, settings, store)
        if run_id is None and run is not None:
            print_message(f"run {run} of {request.issue_id} is not finished, and is continued; --run-id begins another")
        begun = any(info.run == run for info in store.runs())
        return run, _recorded_model(store.read(RunId(run))) if run is not None and begun else None
    finally:
        store.close()


def resume_solving(run: str, options: RunOptions, revision: int | None = None) -> int | None:
    """Take up a run of planning mode again; None where the run is none.

    Raises:
        ReplanningError: it cannot be resumed.
    """
    store = open_store(options.store, must_exist=True)
    try:
        info = _find_run(store, run)
        opened = next(iter(store.read(info.run))).body
        if not isinstance(opened, RunOpened) or not any(phase_of(task) for task in opened.plan.tasks):
            return None
        named = _recorded_model(store.read(info.run))
    finally:
        store.close()
    if revision is None and info.status in ("succeeded", "aborted"):
        how = "succeeded" if info.status == "succeeded" else "was aborted"
        raise NotRunning(f"run {info.run!r} is over: it {how}; solve the goal anew, or use --from REVISION")
    request = request_of(opened.plan) or TaskRequest(goal=opened.plan.goal)
    task = SolveRequest(request, opened.plan, next(iter(options.providers), None) or named)

    def start(planning: PlanningCoordinator) -> Awaitable[object]:
        wanted = info.run if revision is None else planning.engine.fork(info.run, revision)
        return planning.execute_with_planning(wanted)

    return _solve_and_report(task, options, read_settings(options.settings, quiet=options.quiet), start)


def _recorded_model(records: Iterable[Record]) -> str | None:
    """The language model that the command line named last for a run: also who goes on with it means that one."""
    noted = [one.body.data for one in records if isinstance(one.body, PlanningNoted) and one.body.type == _MODEL_NOTE]
    return str(noted[-1].get("name")) if noted else None


def make_plan(task: SolveRequest, options: RunOptions, *, save: Path | None = None) -> int:
    """Only plan: print the plan, or write it into a file; returns the exit code.

    Raises:
        ReplanningError: it cannot be started.
    """
    plans: list[Plan | None] = []
    asked: list[str] = []
    if save is not None:
        _check_writable(save)

    async def start(planning: PlanningCoordinator) -> None:
        plans.append(await planning.make_plan())
        asked.extend(question.text for question in planning.engine.pending(planning.result.run))

    settings = read_settings(options.settings, quiet=options.quiet)
    summary, _ = _run_planning(task, options, settings, start, {})
    if plans and plans[0] is not None:
        _write_plan(plans[0], save, as_json=options.json)
        return int(ExitCode.OK)
    result, reason = summary.result, summary.result.reason
    if asked:
        where = (
            "plan at a terminal, where you are asked, or use solve, which keeps its questions for `replanning approve`"
        )
        reason = f"a person must decide: {'; '.join(asked)} ({where})"
    if options.json:
        print_json({"plan": None, "status": result.status, "reason": reason})
    print_message(f"error: there is no plan: {reason}")
    return int(ExitCode.NEEDS_HUMAN if result.status == "needs_human" else ExitCode.FAILED)


def _check_writable(save: Path) -> None:
    """Find out before a model is asked, and paid, whether a file can be written.

    Raises:
        SettingsError: it cannot.
    """
    problem = ""
    if save.is_dir():
        problem = "is a folder; name a file"
    elif not save.parent.is_dir():
        problem = f"cannot be written: there is no folder {str(save.parent)!r}"
    elif not os.access(save if save.exists() else save.parent, os.W_OK):
        problem = "cannot be written: permission denied"
    if problem:
        raise SettingsError([Problem("--save", f"{save} {problem}; no model was asked")])


def _write_plan(plan: Plan, save: Path | None, *, as_json: bool) -> None:
    dangerous = _dangerous_uses(plan)
    if dangerous:
        print_message(
            f"note: the plan uses tools that may do harm: {'; '.join(dangerous)}; run asks nobody about that again"
        )
    if save is not None:
        try:
            save.write_text(plan.to_json() if save.suffix == ".json" else plan.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise SettingsError([Problem("--save", f"{save} cannot be written: {error.strerror}")]) from error
        print_message(f"the plan is in {save}; replanning run {save} carries it out")
    if as_json:
        document = plan.model_dump(mode="json", exclude_defaults=True)
        print_json({"plan": document, "status": "planned", "dangerous": dangerous})
    elif save is None:
        print(escape_control(plan.to_yaml()), end="")  # noqa: T201 # the result


def _dangerous_uses(plan: Plan) -> list[str]:
    """The uses of tools in a plan that may do harm, in words."""
    tools = {tool.name for tool in plan.tools if tool.dangerous}
    bodies = [body for task in plan.tasks for body in (task, *task.fallbacks)]
    return list(
        dict.fromkeys(describe_tool_use(body.tool, dict(body.arguments)) for body in bodies if body.tool in tools)
    )


PlanningStarter = Callable[[PlanningCoordinator], Awaitable[object]]


def _solve_and_report(task: SolveRequest, options: RunOptions, settings: Settings, start: PlanningStarter) -> int:
    summary, completion = _run_planning(task, options, settings, start, parse_context_options(options.context))
    if options.json:
        print_json({**separate_phases(summary_json(summary), summary.details.live), "completion": completion})
        return int(summary.exit_code)
    if completion is not None:
        _show_completion(completion, summary.result.reason)
    return report_run(summary, json=False)


def _show_completion(completion: JsonObject, reason: str) -> None:
    """What the model, or planning mode itself, has to say at the end beside the reason that is told anyway."""
    summary = completion.get("summary")
    told = summary if isinstance(summary, dict) else {}
    said = str(told.get("reason") or completion.get("comment") or "")
    if said and (said.partition(": ")[2] or said) not in reason:
        print_message(f"{completion.get('status', 'done')}: {said}")
    for name in ("key_outcomes", "recommendations"):
        found = told.get(name)
        for line in found if isinstance(found, list) else ():
            print_message(f"  · {line}")


def _run_planning(
    task: SolveRequest, options: RunOptions, settings: Settings, start: PlanningStarter, context: JsonObject
) -> tuple[RunSummary, JsonObject | None]:
    """Carry a run out; returns how it came out, and what planning mode has to say about that."""
    environment = Environment()
    model = create_llm_provider(
        task.llm or AUTO, settings=settings, environment=environment, redactor=redactor_for(settings)
    )
    store = open_store(options.store)
    try:
        display = create_display(environment.clock, quiet=options.quiet)
        display.budget = settings.budget
        if not options.quiet:
            begun = task.tools.tasks  # a run that is continued stays what it was
            loops = is_tool_loop(task.tools) if begun else not settings.planning.enabled
            does = "nothing is planned; tools are chosen one by one" if loops else "planned and judged"
            print_message(f"{does} by {model.name} ({model.model})")
        parts = _PlanningContext(task, options, settings, model, store, environment, display)
        planning, interrupted = anyio.run(_execute_planning, parts, start, context)
        summary = _run_summary(planning, options, display, store, interrupted=interrupted)
        assert planning.run is not None
        record_completion(planning.run, settings, store, environment)
        return summary, planning.state.completion
    finally:
        store.close()


@dataclass(frozen=True, slots=True)
class _PlanningContext:
    task: SolveRequest
    options: RunOptions
    settings: Settings
    model: LLMProvider
    store: RunStore
    environment: Environment
    display: Display


def _run_summary(
    planning: PlanningCoordinator, options: RunOptions, display: Display, store: RunStore, *, interrupted: bool
) -> RunSummary:
    run = planning.run
    assert run is not None
    return RunSummary(
        result=run.result,
        details=_load_run_details(store, run),
        elapsed=display.elapsed,
        store=options.store,
        durable=store.durable,
        resume_options=options.resume_options(),
        trace_location=trace_location(planning.engine.exporters[0]) if options.trace else "",
        interrupted=interrupted,
        delivery_problems=delivery_problems(planning.engine.exporters),
    )


async def _execute_planning(
    parts: _PlanningContext, start: PlanningStarter, context: JsonObject
) -> tuple[PlanningCoordinator, bool]:
    """Carry out what is wanted; returns the coordinator, and whether it was stopped at once."""
    shell, timeout, most = ContextShell(), parts.settings.timeout.task, parts.settings.max_output
    tools, kinds = parts.task.tools, {"shell": shell}
    async with ToolExecutor(tools, default_timeout=timeout, output_limit=most, kinds=kinds) as work:
        library = await discover_tools(work, parts.task.tools, quiet=parts.options.quiet)
        if not library.tools:
            raise SettingsError([Problem("--tools", "there are no tools: none is described, and no server has any")])
        planning = _create_coordinator(parts, library, work)

        def watch(run: PlanRun) -> None:
            shell.on_change = run.change_context
            work.watch(run.change_resource)
            parts.display.watch(run)
            if context:
                run.change_context(context)
            if parts.task.llm not in (None, _recorded_model(run.records())):
                run.note(_MODEL_NOTE, {"name": parts.task.llm})

        planning.on_run_started = watch
        try:
            return await _run_with_signals(parts, planning, start)
        finally:
            work.watch(None)


def _create_coordinator(parts: _PlanningContext, library: Plan, work: ToolExecutor) -> PlanningCoordinator:
    options, heard = parts.options, accepts_comments(parts.options)
    planning = PlanningCoordinator(
        parts.settings,
        parts.model,
        library,
        with_past_executions(parts.task.request, parts.settings),
        work=work,
        gate=create_gate(
            options.ask, parts.store, parts.display, default_to_terminal=not options.json, remote_answers=heard
        ),
        store=parts.store,
        exporters=[
            *([open_trace_exporter(options.trace)] if options.trace else []),
            create_history_exporter(parts.settings),
            *open_notifiers(options.notify),
        ],
        environment=parts.environment,
        workers=options.workers,
        wait_for_answers=heard,
    )
    planning.engine.monitor.on(object, planning_listener(parts.display))
    return planning


async def _run_with_signals(
    parts: _PlanningContext, planning: PlanningCoordinator, start: PlanningStarter
) -> tuple[PlanningCoordinator, bool]:
    """Carry a run out, show how it goes, and hear what stops it."""
    failure: ReplanningError | None = None
    scope = anyio.CancelScope()
    hearing = anyio.CancelScope()
    async with parts.display.active(), anyio.create_task_group() as group:
        group.start_soon(_on_signals, planning, scope)
        group.start_soon(_listen_for_comments, parts, planning, hearing)
        try:
            with scope:
                await start(planning)
        except ReplanningError as error:
            failure = error  # raised below, not wrapped into a group
        finally:
            hearing.cancel()
            await planning.engine.aclose()
            await parts.model.aclose()
        group.cancel_scope.cancel()
    if failure is not None or planning.run is None:
        raise failure or ReplanningError("the run could not be opened")
    return planning, scope.cancelled_caught


async def _listen_for_comments(
    parts: _PlanningContext, planning: PlanningCoordinator, scope: anyio.CancelScope
) -> None:
    """Hear what people write below issues, until that is no longer of use."""
    if not accepts_comments(parts.options):
        return
    display = parts.display
    with scope:
        async with anyio.create_task_group() as group:
            for steering in create_steerings(
                planning, parts.task.seen_comments, lambda text: display.show_note(Line("✉", escape_control(text)))
            ):
                group.start_soon(steering.listen)


async def _on_signals(planning: PlanningCoordinator, scope: anyio.CancelScope) -> None:
    """Pause at the first signal, and stop everything at the second."""
    with anyio.open_signal_receiver(*stop_signals()) as signals:
        first = True
        async for number in signals:
            if first and planning.run is not None:
                planning.run.pause(f"{number.name} was received")
            else:
                scope.cancel()
            first = False
