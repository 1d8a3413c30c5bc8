"""Takes a goal in words to its end with a language model, or only plans it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio

from replanning import Environment, Plan, PlanRun, ReplanningError, Settings
from replanning._errors import NotRunning, Problem, SettingsError
from replanning._ids import RunId
from replanning._llms import AUTO, create_llm_provider
from replanning._opening import redactor_for
from replanning._records import Record
from replanning.cli._context import TellingShell
from replanning.cli._gate import gate_for
from replanning.cli._hearing import is_heard, steerings
from replanning.cli._narrator import Line
from replanning.cli._notifying import open_notifiers, unsent
from replanning.cli._options import ExitCode
from replanning.cli._output import plain, say, show_json
from replanning.cli._planning_history import check_run, conclude, history_of, unfinished, with_earlier
from replanning.cli._progress import Display, display_for
from replanning.cli._render import Summary, as_json
from replanning.cli._run import RunOptions, _find, _story, discovered, pairs, report, stopping_signals
from replanning.cli._settings import read_settings
from replanning.cli._stores import may_hold_runs, open_store
from replanning.cli._task import Task
from replanning.cli._telling import phases_apart, teller
from replanning.cli._tracing import open_trace, place_of
from replanning.events import PlanningNoted, RunOpened
from replanning.interfaces import JsonObject, RunStore
from replanning.llm import LLMProvider
from replanning.planning import PlanningCoordinator, TaskRequest, request_of
from replanning.planning._steps import is_loop, phase_of, use_of
from replanning.tools import ToolExecutor

_MODEL: Final = "model"
"""What is noted of a run whose language model the command line names."""


def solve(task: Task, options: RunOptions, *, run_id: str | None = None) -> int:
    """Take a goal to its end, print how it came out, and return the exit code.

    Raises:
        ReplanningError: it cannot be started.
    """
    settings = read_settings(options.settings, quiet=options.quiet)
    run, named = _continued(task.request, run_id, settings, options.store)

    def start(planning: PlanningCoordinator) -> Awaitable[object]:
        return planning.execute_with_planning(run)

    return _solved(replace(task, llm=task.llm or named), options, settings, start)


def _continued(
    request: TaskRequest, run_id: str | None, settings: Settings, place: str
) -> tuple[str | None, str | None]:
    """The run that is meant, where one is, and the language model that was named for it, where it has begun.

    Raises:
        SettingsError: the run of that name is about something else.
        NotRunning: it was given up.
        StoreError: its store cannot be read.
    """
    if not may_hold_runs(place):
        return run_id, None
    store = open_store(place)
    try:
        if run_id is not None:
            check_run(run_id, request, settings, store)
        run = run_id or unfinished(request, settings, store)
        if run_id is None and run is not None:
            say(f"run {run} of {request.issue_id} is not finished, and is continued; --run-id begins another")
        begun = any(info.run == run for info in store.runs())
        return run, _named_model(store.read(RunId(run))) if run is not None and begun else None
    finally:
        store.close()


def resume_solving(run: str, options: RunOptions, revision: int | None = None) -> int | None:
    """Take up a run of planning mode again; None where the run is none.

    Raises:
        ReplanningError: it cannot be resumed.
    """
    store = open_store(options.store, must_exist=True)
    try:
        info = _find(store, run)
        opened = next(iter(store.read(info.run))).body
        if not isinstance(opened, RunOpened) or not any(phase_of(task) for task in opened.plan.tasks):
            return None
        named = _named_model(store.read(info.run))
    finally:
        store.close()
    if revision is None and info.status in ("succeeded", "aborted"):
        how = "succeeded" if info.status == "succeeded" else "was aborted"
        raise NotRunning(f"run {info.run!r} is over: it {how}; solve the goal anew, or use --from REVISION")
    request = request_of(opened.plan) or TaskRequest(goal=opened.plan.goal)
    task = Task(request, opened.plan, next(iter(options.providers), None) or named)

    def start(planning: PlanningCoordinator) -> Awaitable[object]:
        wanted = info.run if revision is None else planning.engine.fork(info.run, revision)
        return planning.execute_with_planning(wanted)

    return _solved(task, options, read_settings(options.settings, quiet=options.quiet), start)


def _named_model(records: Iterable[Record]) -> str | None:
    """The language model that the command line named last for a run: also who goes on with it means that one."""
    noted = [one.body.data for one in records if isinstance(one.body, PlanningNoted) and one.body.type == _MODEL]
    return str(noted[-1].get("name")) if noted else None


def make_plan(task: Task, options: RunOptions, *, save: Path | None = None) -> int:
    """Only plan: print the plan, or write it into a file; returns the exit code.

    Raises:
        ReplanningError: it cannot be started.
    """
    plans: list[Plan | None] = []
    asked: list[str] = []
    if save is not None:
        _check_place(save)

    async def start(planning: PlanningCoordinator) -> None:
        plans.append(await planning.make_plan())
        asked.extend(question.text for question in planning.engine.pending(planning.result.run))

    settings = read_settings(options.settings, quiet=options.quiet)
    summary, _ = _carry_out(task, options, settings, start, {})
    if plans and plans[0] is not None:
        _hand_over(plans[0], save, as_json=options.json)
        return int(ExitCode.OK)
    result, reason = summary.result, summary.result.reason
    if asked:
        where = (
            "plan at a terminal, where you are asked, or use solve, which keeps its questions for `replanning approve`"
        )
        reason = f"a person must decide: {'; '.join(asked)} ({where})"
    if options.json:
        show_json({"plan": None, "status": result.status, "reason": reason})
    say(f"error: there is no plan: {reason}")
    return int(ExitCode.NEEDS_HUMAN if result.status == "needs_human" else ExitCode.FAILED)


def _check_place(save: Path) -> None:
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


def _hand_over(plan: Plan, save: Path | None, *, as_json: bool) -> None:
    dangerous = _dangerous(plan)
    if dangerous:
        say(f"note: the plan uses tools that may do harm: {'; '.join(dangerous)}; run asks nobody about that again")
    if save is not None:
        try:
            save.write_text(plan.to_json() if save.suffix == ".json" else plan.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise SettingsError([Problem("--save", f"{save} cannot be written: {error.strerror}")]) from error
        say(f"the plan is in {save}; replanning run {save} carries it out")
    if as_json:
        document = plan.model_dump(mode="json", exclude_defaults=True)
        show_json({"plan": document, "status": "planned", "dangerous": dangerous})
    elif save is None:
        print(plain(plan.to_yaml()), end="")  # noqa: T201 # the result


def _dangerous(plan: Plan) -> list[str]:
    """The uses of tools in a plan that may do harm, in words."""
    tools = {tool.name for tool in plan.tools if tool.dangerous}
    bodies = [body for task in plan.tasks for body in (task, *task.fallbacks)]
    return list(dict.fromkeys(use_of(body.tool, dict(body.arguments)) for body in bodies if body.tool in tools))


Start = Callable[[PlanningCoordinator], Awaitable[object]]


def _solved(task: Task, options: RunOptions, settings: Settings, start: Start) -> int:
    summary, completion = _carry_out(task, options, settings, start, pairs(options.context))
    if options.json:
        show_json({**phases_apart(as_json(summary), summary.story.live), "completion": completion})
        return int(summary.exit_code)
    if completion is not None:
        _show_completion(completion, summary.result.reason)
    return report(summary, json=False)


def _show_completion(completion: JsonObject, reason: str) -> None:
    """What the model, or planning mode itself, has to say at the end beside the reason that is told anyway."""
    summary = completion.get("summary")
    told = summary if isinstance(summary, dict) else {}
    said = str(told.get("reason") or completion.get("comment") or "")
    if said and (said.partition(": ")[2] or said) not in reason:
        say(f"{completion.get('status', 'done')}: {said}")
    for name in ("key_outcomes", "recommendations"):
        found = told.get(name)
        for line in found if isinstance(found, list) else ():
            say(f"  · {line}")


def _carry_out(
    task: Task, options: RunOptions, settings: Settings, start: Start, context: JsonObject
) -> tuple[Summary, JsonObject | None]:
    """Carry a run out; returns how it came out, and what planning mode has to say about that."""
    environment = Environment()
    model = create_llm_provider(
        task.llm or AUTO, settings=settings, environment=environment, redactor=redactor_for(settings)
    )
    store = open_store(options.store)
    try:
        display = display_for(environment.clock, quiet=options.quiet)
        display.budget = settings.budget
        if not options.quiet:
            begun = task.tools.tasks  # a run that is continued stays what it was
            loops = is_loop(task.tools) if begun else not settings.planning.enabled
            does = "nothing is planned; tools are chosen one by one" if loops else "planned and judged"
            say(f"{does} by {model.name} ({model.model})")
        parts = _Parts(task, options, settings, model, store, environment, display)
        planning, interrupted = anyio.run(_execute, parts, start, context)
        summary = _summary(planning, options, display, store, interrupted=interrupted)
        assert planning.run is not None
        conclude(planning.run, settings, store, environment)
        return summary, planning.state.completion
    finally:
        store.close()


@dataclass(frozen=True, slots=True)
class _Parts:
    task: Task
    options: RunOptions
    settings: Settings
    model: LLMProvider
    store: RunStore
    environment: Environment
    display: Display


def _summary(
    planning: PlanningCoordinator, options: RunOptions, display: Display, store: RunStore, *, interrupted: bool
) -> Summary:
    run = planning.run
    assert run is not None
    return Summary(
        result=run.result,
        story=_story(store, run),
        elapsed=display.elapsed,
        store=options.store,
        durable=store.durable,
        resume=options.again(),
        trace=place_of(planning.engine.exporters[0]) if options.trace else "",
        interrupted=interrupted,
        unsent=unsent(planning.engine.exporters),
    )


async def _execute(parts: _Parts, start: Start, context: JsonObject) -> tuple[PlanningCoordinator, bool]:
    """Carry out what is wanted; returns the coordinator, and whether it was stopped at once."""
    shell, timeout, most = TellingShell(), parts.settings.timeout.task, parts.settings.max_output
    tools, kinds = parts.task.tools, {"shell": shell}
    async with ToolExecutor(tools, default_timeout=timeout, output_limit=most, kinds=kinds) as work:
        library = await discovered(work, parts.task.tools, quiet=parts.options.quiet)
        if not library.tools:
            raise SettingsError([Problem("--tools", "there are no tools: none is described, and no server has any")])
        planning = _coordinator(parts, library, work)

        def watch(run: PlanRun) -> None:
            shell.change = run.change_context
            work.watch(run.change_resource)
            parts.display.watch(run)
            if context:
                run.change_context(context)
            if parts.task.llm not in (None, _named_model(run.records())):
                run.note(_MODEL, {"name": parts.task.llm})

        planning.watching = watch
        try:
            return await _followed(parts, planning, start)
        finally:
            work.watch(None)


def _coordinator(parts: _Parts, library: Plan, work: ToolExecutor) -> PlanningCoordinator:
    options, heard = parts.options, is_heard(parts.options)
    planning = PlanningCoordinator(
        parts.settings,
        parts.model,
        library,
        with_earlier(parts.task.request, parts.settings),
        work=work,
        gate=gate_for(options.ask, parts.store, parts.display, terminal=not options.json, heard=heard),
        store=parts.store,
        exporters=[
            *([open_trace(options.trace)] if options.trace else []),
            history_of(parts.settings),
            *open_notifiers(options.notify),
        ],
        environment=parts.environment,
        workers=options.workers,
        patient=heard,
    )
    planning.engine.monitor.on(object, teller(parts.display))
    return planning


async def _followed(parts: _Parts, planning: PlanningCoordinator, start: Start) -> tuple[PlanningCoordinator, bool]:
    """Carry a run out, show how it goes, and hear what stops it."""
    failure: ReplanningError | None = None
    scope = anyio.CancelScope()
    hearing = anyio.CancelScope()
    async with parts.display.shown(), anyio.create_task_group() as group:
        group.start_soon(_on_signals, planning, scope)
        group.start_soon(_hear, parts, planning, hearing)
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


async def _hear(parts: _Parts, planning: PlanningCoordinator, scope: anyio.CancelScope) -> None:
    """Hear what people write below issues, until that is no longer of use."""
    if not is_heard(parts.options):
        return
    display = parts.display
    with scope:
        async with anyio.create_task_group() as group:
            for steering in steerings(planning, parts.task.known, lambda text: display.add(Line("✉", plain(text)))):
                group.start_soon(steering.listen)


async def _on_signals(planning: PlanningCoordinator, scope: anyio.CancelScope) -> None:
    """Pause at the first signal, and stop everything at the second."""
    with anyio.open_signal_receiver(*stopping_signals()) as signals:
        first = True
        async for number in signals:
            if first and planning.run is not None:
                planning.run.pause(f"{number.name} was received")
            else:
                scope.cancel()
            first = False
