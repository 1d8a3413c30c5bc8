"""Commands that continue runs: `resume`, for each kind of run, `rerun` and `undo`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from replanning import Plan, PlanRun, ReplanningEngine
from replanning.cli import lookup
from replanning.cli.app import (
    DIFF_STYLES,
    RUN_EXIT_CODES_HELP,
    ExitCode,
    Program,
    RunArgument,
    RunOptions,
    console,
    epilog,
    escape_control,
    fail,
    is_phase_task,
    print_json,
    print_message,
    refuse,
)
from replanning.cli.context import split_set_options
from replanning.cli.run import resume_plan
from replanning.environment import SystemClock
from replanning.errors import JournalCorrupt, NotRunning, PlanError
from replanning.history.export import effect_json
from replanning.history.status import is_owner_alive, run_status
from replanning.history.wording import effect_line
from replanning.journal import (
    ErrorContained,
    PlanRevised,
    Record,
    RecordBody,
    RunInfo,
    RunOpened,
    RunStore,
)
from replanning.live import Correction, Rerun
from replanning.plan.included_files import locate_problems
from replanning.plan.messages import join_names, pluralise
from replanning.plan.types import JsonObject, JsonValue, RunId, TaskId
from replanning.run.opening import adoption_place, edit_place
from replanning.run.undo import UndoPlan
from replanning.tools import check_tools

commands = Program()

_MAX_DIFF_LINES: Final = 60
"""Maximum number of diff lines of a correction."""

_MAX_ALIKE: Final = 8
"""Maximum number of tasks with one reason that have a line each."""

YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask: answer yes to every question.")
]


@commands.command(
    epilog=epilog(
        "replanning resume latest",
        "replanning resume 20250131-120000-1a2b3c4d5e6f --set context.region=us",
        "replanning resume latest --set token=…    a secret parameter, which no journal keeps",
        "replanning resume latest --retry    try the failed tasks again, once the service is back",
        "replanning resume latest --retry --not-done pay --done mail    what you know about calls in doubt",
        "replanning resume latest --plan plan.yaml    continue with the corrected plan in this file",
        "replanning resume latest --plan plan.yaml --rerun none -y    keep finished tasks, and ask nothing",
        "replanning resume 20250131-120000-1a2b3c4d5e6f --from 2    a new run of the unfinished tasks of revision 2",
        codes=RUN_EXIT_CODES_HELP,
    )
)
def resume(
    run: RunArgument,
    *,
    revision: Annotated[
        int | None,
        typer.Option(
            "--from",
            metavar="REVISION",
            min=0,
            help="Start a new run from this revision of the old one.",
        ),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="The plan of the run, corrected or not. Its differences from the run's plan are"
            " shown and, once you agree, applied. It also supplies literal secrets, which no journal"
            " keeps. Repeat each --set for the context that the run was opened with; --set may also"
            " change parameters.",
        ),
    ] = None,
    rerun: Annotated[
        Rerun | None,
        typer.Option(
            "--rerun",
            help="Whether to run finished and running tasks again if the plan file changes them or"
            " their context values, with their dependents: changed, or none. By default you are "
            "asked.",
        ),
    ] = None,
    yes: YesOption = False,
    retry: Annotated[
        bool,
        typer.Option(
            "--retry",
            help="Try all failed tasks again, once a cause outside of the plan was removed. You are"
            " asked about tasks that may have taken effect.",
        ),
    ] = False,
    not_done: Annotated[
        list[str] | None,
        typer.Option(
            "--not-done",
            metavar="TASK",
            help="You have checked that this task did not take effect, so --retry tries it again."
            " Repeatable.",
        ),
    ] = None,
    done: Annotated[
        list[str] | None,
        typer.Option(
            "--done",
            metavar="TASK",
            help="This task took effect, or you have done it by hand: --retry continues without it."
            " Repeatable.",
        ),
    ] = None,
    options: RunOptions,
) -> None:
    """Resume a run that was paused or stopped, that waits for a person, or whose process died.

    Finished tasks are not run again. The result of a run that has succeeded is shown again. A failed
    run continues under its own id: with --retry if the cause was outside of the plan, such as a
    service that was down, and with --plan if it was in the plan. Finished, unchanged tasks are kept,
    and failed ones are tried again. If another process executes the run, that process does so.
    """
    missed = list(not_done or ())
    effected = list(done or ())
    named = [*missed, *effected]
    _check_options(plan_file, revision, rerun, yes=yes, retry=retry, named=named)
    with closing(lookup.open_store(options.store, must_exist=True)) as opened_store:
        info = lookup.find_run(opened_store, run)
        remote = lookup.is_on_temporal(options.store)  # its workers resume it
        records: list[Record] = []
        if not remote:
            records = list(opened_store.read(info.run))
    if plan_file is None and revision is None:
        _check_not_aborted(info)
    shows_result = revision is None and info.status == "succeeded"
    if shows_result:
        retry = False
        # A supervisor that resumes every run would take another code for a failure.
        print_message(
            f"run {info.run!r} has succeeded; there is nothing to resume, but `replanning rerun`"
            " runs its tasks again"
        )
        if not _can_show_result(records):
            raise typer.Exit(ExitCode.OK)
    if remote:
        _refuse_options(plan_file, "it is on Temporal, whose worker has its plan", retry=retry)
        from replanning.cli import temporal  # other runs do not need it

        raise typer.Exit(temporal.resume(info, options, revision))
    try_again: Callable[[], ExitCode] | None = None
    if retry:
        opened = _read_opening(records, info.run)
        try_again = partial(_try_again, info, opened, options, missed, effected)
        if lookup.belongs_to_program(opened) and plan_file is None:
            raise typer.Exit(try_again())
    opened = _check_opening(records, info.run, plan_file)
    if _is_of_planning_mode(opened):
        why = "it is in planning mode, which has no plan file"
        _refuse_options(plan_file, why, retry=retry)
        from replanning.cli.solve import resume_planning  # other runs need no planning mode

        raise typer.Exit(resume_planning(info.run, opened.plan, options, revision))
    if shows_result:
        records = []  # no tool will run, so the folder may be missing
    directory = lookup.find_directory(options, records)
    if plan_file is None:
        if try_again is not None:
            try_again()
        raise typer.Exit(resume_plan(info.run, opened, options, revision, directory))
    given = _read_correction(plan_file, options)
    agreed = _agree_on_correction(info, given, options, revision, rerun, yes=yes)
    if revision is None and is_owner_alive(info):
        _send_correction(info, given, agreed, options, retry=retry)
        return
    if try_again is not None:
        try_again()
    adopt = _how_to_adopt(info, given, agreed, options, revision)
    code = resume_plan(info.run, opened, options, revision, directory, given=given, adopt=adopt)
    raise typer.Exit(code)


@commands.command(
    epilog=epilog(
        "replanning rerun latest report    the task report and its dependents",
        "replanning rerun 20250131-120000-1a2b3c4d5e6f fetch check --only",
        "replanning rerun latest deploy -y    although this deploys again",
        codes=RUN_EXIT_CODES_HELP,
    )
)
def rerun(
    run: RunArgument,
    task: Annotated[
        list[str],
        typer.Argument(metavar="TASK", help="A task to run again; several may follow."),
    ],
    *,
    only: Annotated[
        bool, typer.Option("--only", help="Do not run the dependents of the tasks again.")
    ] = False,
    yes: YesOption = False,
    options: RunOptions,
) -> None:
    """Run tasks of a run and their dependents again, in a new run.

    Everything else stays as the old run left it. Effects that this would repeat are listed first,
    and you are asked.
    """
    if lookup.is_on_temporal(options.store):
        fail("rerun needs a store of its own; on Temporal, start a new run instead")
    settings = lookup.read_settings(options.settings, quiet=True)
    with closing(lookup.open_store(options.store, must_exist=True)) as store:
        info = lookup.find_run(store, run)
        records = list(store.read(info.run))
        opened = _check_opening(records, info.run)
        directory = lookup.find_directory(options, records)
        if _is_of_planning_mode(opened):
            fail(f"run {info.run!r} is in planning mode: its phases depend on one another")
        engine = ReplanningEngine([], settings=settings, store=store)
        correction = engine.compare_rerun(info.run, *task, only=only)
        _print_correction(correction)
        if correction.effects and not yes:
            _ask("Run them again?", options)
        _require_all_secrets(opened, options)
        new_run = engine.rerun(info.run, *task, only=only, by=lookup.user_name(None))
    raise typer.Exit(resume_plan(new_run, opened, options, None, directory))


@commands.command(
    epilog=epilog(
        "replanning undo latest --dry-run    show what would be taken back, and what cannot be",
        "replanning undo latest --leave tell    the effect of the task tell stays",
        "replanning undo latest --by-hand pay -y    somebody has refunded what the task pay had paid",
        "replanning undo 20250131-120000-1a2b3c4d5e6f --to reserve    only changes after the task reserve",
        codes="0 everything is taken back, or there is nothing to take back · 1 an effect could not be"
        " taken back, or the rest of the run failed · 2 wrong usage or store, or a decision is missing;"
        " nothing was changed · 3 paused, or left to the program of the run · 4 needs a person's answer"
        " · 130 stopped by a second Ctrl-C",
    )
)
def undo(
    run: RunArgument,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="TASK", help="Take back only changes made after this task was done."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="TASK",
            help="Take back only the changes of this task; the rest of the run continues."
            " Repeatable.",
        ),
    ] = None,
    leave: Annotated[
        list[str] | None,
        typer.Option(
            "--leave",
            metavar="TASK",
            help="Leave the effect of this task, or of one attempt at it, such as pay#1."
            " Repeatable.",
        ),
    ] = None,
    by_hand: Annotated[
        list[str] | None,
        typer.Option(
            "--by-hand",
            metavar="TASK",
            help="A person has taken back the effect of this task, or of one attempt at it."
            " Repeatable.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")
    ] = False,
    yes: YesOption = False,
    options: RunOptions,
) -> None:
    """Take back the changes of a run by the calls that its tasks and tools state under `undo`, latest first.

    Running and waiting tasks are stopped first, and the run ends as aborted. Effects that no call
    can take back are listed, and you decide: leave them, or take them back by hand. Without an
    answer, nothing is done.
    """
    if lookup.is_on_temporal(options.store):
        fail(
            "undo does not work on Temporal: answer a question of the run with `replanning reject"
            " --undo`, or call `TemporalRun.undo` in a program"
        )
    settings = lookup.read_settings(options.settings, quiet=True)
    by = lookup.user_name(None)
    with closing(lookup.open_store(options.store, must_exist=True)) as store:
        info = lookup.find_run(store, run)
        records = list(store.read(info.run))
        opened = _read_opening(records, info.run)
        is_of_program = lookup.belongs_to_program(opened)
        directory = Path()
        if not is_of_program:
            # The functions of a program work in the directory of that program.
            directory = lookup.find_directory(options, records)
        engine = ReplanningEngine([], settings=settings, store=store)
        left = list(leave or ())
        done = list(by_hand or ())
        part = only or ()
        plan = engine.compare_undo(info.run, to=to, only=part, leave=left, by_hand=done)
        if dry_run and options.json:
            print_json({"run": info.run, **_undo_json(plan)})
            return
        _print_undo(plan)
        if dry_run:
            return
        if plan.undecided:
            _decide_effects(plan, left, done, options)
            plan = engine.compare_undo(info.run, to=to, only=part, leave=left, by_hand=done)
        if not plan.changes and not _is_under_way(engine, info.run):
            print_message("there is nothing to take back")
            return
        if plan.changes:
            if not yes:
                _ask("Take this back?", options)
            if not is_of_program and not is_owner_alive(info):
                _require_all_secrets(opened, options)
            engine.undo(info.run, to=to, only=part, leave=left, by_hand=done, by=by)
            if is_owner_alive(info):
                _report_edit(store, info, options, "undo", by)
                return
    if is_of_program:
        print_message(
            f"run {info.run!r} executes functions of a program; it is taken back once that program"
            f" resumes it, with run_id={info.run!r}"
        )
        raise typer.Exit(ExitCode.PAUSED)
    code = resume_plan(info.run, opened, options, None, directory)
    with closing(lookup.open_store(options.store)) as store:
        status = lookup.find_run(store, info.run).status
        if status == "aborted" and not _is_under_way(ReplanningEngine([], store=store), info.run):
            code = ExitCode.OK  # a run that was taken back ends as aborted
    raise typer.Exit(code)


def _check_options(
    plan_file: Path | None,
    revision: int | None,
    rerun: Rerun | None,
    *,
    yes: bool,
    retry: bool,
    named: Sequence[str],
) -> None:
    """End the command if an option is stated without the option that it belongs to.

    Args:
        plan_file: the corrected plan.
        revision: the revision that a new run starts from.
        rerun: whether finished tasks that the corrected plan changes run again.
        yes: whether to agree to the questions about it.
        retry: whether failed tasks are tried again.
        named: the tasks in doubt that the person has decided about.
    """
    if plan_file is None and (rerun is not None or yes):
        fail("--rerun and --yes belong to a corrected plan; name its file with --plan")
    if retry:
        if revision is not None:
            fail(
                "--retry belongs to the run itself; use it to resume the new run that --from starts"
            )
    elif named:
        fail("--not-done and --done belong to tasks that are tried again: state --retry")


def _refuse_options(plan_file: Path | None, why: str, *, retry: bool) -> None:
    """End the command if an option does not apply to this kind of run."""
    if plan_file is not None:
        fail(f"--plan does not apply to this run: {why}")
    if retry:
        fail(f"--retry does not apply to this run: {why}")


def _check_not_aborted(info: RunInfo) -> None:
    """Raise if a run was aborted; only a corrected plan can continue it."""
    if info.status == "aborted":
        advice = "start a new run, or one from a revision of this one with --from"
        raise NotRunning(f"run {info.run!r} was aborted: {advice} (0 is the original plan)")


def _read_opening(records: Sequence[Record], run: RunId) -> RunOpened:
    """Return the record that opened a run."""
    if records:
        body = records[0].body
        if isinstance(body, RunOpened):
            return body
    raise JournalCorrupt(f"the journal of run {run!r} does not begin with the opening of a run")


def _is_of_planning_mode(opened: RunOpened) -> bool:
    """Return whether a run was planned by a language model."""
    return any(map(is_phase_task, opened.plan.tasks))


def _require_all_secrets(opened: RunOpened, options: RunOptions) -> None:
    """End the command if a secret parameter is missing, before the run is changed or a new one made."""
    texts = split_set_options(options.context)[1]
    lost: list[str] = []
    for name, parameter in opened.plan.parameters.items():
        if parameter.secret and name not in texts:
            lost.append(name)
    lookup.require_secrets(opened.run, lost)


def _check_opening(
    records: Sequence[Record], run: RunId, plan_file: Path | None = None
) -> RunOpened:
    """Return the record that opened a run; raise if only its own program can resume the run."""
    opened = _read_opening(records, run)
    if lookup.belongs_to_program(opened):
        what = "executes functions of a program"
        if opened.open_ended:
            what = "is the session of a program"
        how = lookup.how_a_program_resumes(opened)
        if plan_file is not None and not opened.open_ended:
            how += f"; `engine.adopt({run!r}, plan)` gives it a corrected plan"
        raise NotRunning(f"run {run!r} {what}; only that program can resume it{how}")
    return opened


def _can_show_result(records: Sequence[Record]) -> bool:
    """Return whether resuming a run that has succeeded shows its result again.

    It does not for a run of a program, nor for one on Temporal, whose records were not read.
    """
    if not records:
        return False
    opened = records[0].body
    return not isinstance(opened, RunOpened) or not lookup.belongs_to_program(opened)


# Corrected plans


def _read_correction(path: Path, options: RunOptions) -> Plan:
    """Return the corrected plan in a file, with its tools checked."""
    given = lookup.read_plan(str(path), options.context)
    problems = check_tools(given)
    if problems:
        raise PlanError(locate_problems(problems, str(path)))
    return given


def _agree_on_correction(
    info: RunInfo,
    given: Plan,
    options: RunOptions,
    revision: int | None,
    rerun: Rerun | None,
    *,
    yes: bool,
) -> Rerun | None:
    """Show what a corrected plan changes in a run, and ask whether to apply it.

    Returns:
        Whether the finished tasks that it changes run again; None if it makes no difference.
    """
    settings = lookup.read_settings(options.settings, quiet=True)
    with closing(lookup.open_store(options.store)) as store:
        engine = ReplanningEngine([], settings=settings, store=store)
        compare = partial(engine.compare, info.run, given, revision=revision)
        correction = compare(rerun=rerun or "changed")
        is_open = rerun is None and len(correction.again) > 0
        if is_open and not _ask_about_finished(correction, options, yes=yes):
            correction = compare(rerun="none")
    if not correction:
        return None
    _print_correction(correction)
    if not yes:
        _ask("Apply this to the run?", options)
    # Tasks left in doubt by the end of a process were not asked about, so they do not run again.
    if correction.again:
        return "changed"
    return "none"


def _how_to_adopt(
    info: RunInfo, given: Plan, rerun: Rerun | None, options: RunOptions, revision: int | None
) -> Callable[[PlanRun], object] | None:
    """Return a function that makes a resumed run adopt a corrected plan; None if it need not.

    An aborted run adopts the plan here: its budget is used up, so that it would end again at once.
    """
    if rerun is None:
        return None
    by = lookup.user_name(None)
    if revision is not None or info.status != "aborted":
        return partial(PlanRun.adopt, plan=given, rerun=rerun, by=by)
    with closing(lookup.open_store(options.store)) as store:
        ReplanningEngine([], store=store).adopt(info.run, given, rerun=rerun, by=by)
    return None


def _send_correction(
    info: RunInfo,
    given: Plan,
    rerun: Rerun | None,
    options: RunOptions,
    *,
    retry: bool,
) -> None:
    """Send a corrected plan to the process that executes a run, and report the outcome.

    Args:
        info: the run.
        given: the plan.
        rerun: whether the finished tasks that it changes run again; None if it changes nothing.
        options: of the command line.
        retry: whether failed tasks are tried again as well, which needs another message.
    """
    if retry:
        fail("--retry: another process executes this run; state it without --plan")
    if rerun is None:
        what = f"the corrected plan makes no difference to run {info.run}"
        print_message(f"{what}, which another process executes")
        return
    if options.directory is not None:
        fail("--directory: another process executes this run; pause it, and then resume it")
    by = lookup.user_name(None)
    with closing(lookup.open_store(options.store)) as store:
        ReplanningEngine([], store=store).adopt(info.run, given, rerun=rerun, by=by)
        _report_edit(store, info, options, "adopt", by)


def _print_correction(correction: Correction) -> None:
    """Print the diff of a correction, and the tasks that would run again."""
    out = console(error=True)
    lines = correction.diff.splitlines()
    for line in lines[:_MAX_DIFF_LINES]:
        out.print(f"  {escape_control(line)}", style=DIFF_STYLES.get(line[:1], ""), markup=False)
    if len(lines) > _MAX_DIFF_LINES:
        out.print(f"  … and {pluralise(len(lines) - _MAX_DIFF_LINES, 'more line')}")
    _print_again(correction)


def _print_again(correction: Correction) -> None:
    out = console(error=True)
    alike: dict[str, list[TaskId]] = {}
    for task_id, why in correction.again.items():
        reason = why
        if task_id in correction.effects:
            effect = correction.effects[task_id]
            if effect:
                reason += f"; this repeats its effect ({effect})"
            else:
                reason += "; this may repeat an effect, as no `effect` is stated"
        alike.setdefault(reason, []).append(task_id)
    for reason, task_ids in alike.items():
        lines = [f"  {task_id} is run again: {reason}" for task_id in task_ids]
        # The elements of a list share one reason.
        if len(lines) > _MAX_ALIKE:
            names = join_names(task_ids, _MAX_ALIKE)
            lines = [f"  each of {len(task_ids)} tasks ({names}) is run again: {reason}"]
        for line in lines:
            out.print(escape_control(line), style="yellow", markup=False)


def _ask_about_finished(correction: Correction, options: RunOptions, *, yes: bool) -> bool:
    """Return whether finished and running tasks that are changed run again."""
    if yes:
        return True
    _print_again(correction)
    _require_terminal(options, "--rerun changed or --rerun none decides about these tasks")
    count = pluralise(len(correction.again), "task")
    question = f"Run {count} again? Otherwise finished ones are kept, and running ones continue"
    return typer.confirm(question, err=True)


def _ask(question: str, options: RunOptions) -> None:
    """Ask whether to continue; end the command if not."""
    _require_terminal(options, "--yes agrees to it")
    if not typer.confirm(question, err=True):
        print_message("nothing was changed")
        raise typer.Exit


def _require_terminal(options: RunOptions, instead: str) -> None:
    is_silent = options.json or options.ask in ("never", "store")
    if is_silent or not sys.stdin.isatty() or not sys.stderr.isatty():
        fail(f"nothing was changed, because nobody can be asked here; {instead}")


# Retries of failed tasks


def _try_again(
    info: RunInfo,
    opened: RunOpened,
    options: RunOptions,
    not_done: list[str],
    done: list[str],
) -> ExitCode:
    """Have failed tasks tried again, by this process once it resumes the run, or by another.

    End the command if another process executes the run, or if a person must check an effect first.

    Args:
        info: the run.
        opened: the record that opened it.
        options: of the command line.
        not_done: tasks in doubt that did not take effect; a person's decisions are added.
        done: tasks that took effect or that a person has done; a person's decisions are added.

    Returns:
        The exit code if only a program can resume the run.
    """
    by = lookup.user_name(None)
    with closing(lookup.open_store(options.store)) as store:
        engine = ReplanningEngine([], store=store)
        correction = engine.compare_retry(info.run, not_done=not_done, done=done)
        _decide_doubts(correction, not_done, done, options)
        correction = engine.retry(info.run, not_done=not_done, done=done, by=by)
        left_to_answers = _failures_in_question(store, info, options)
        for line in left_to_answers:
            print_message(line)
        if not correction and not left_to_answers:
            print_message(f"no task of run {info.run!r} has failed, so none is tried again")
        elif correction and not options.quiet:
            _print_correction(correction)
        if is_owner_alive(info):
            if correction:
                _report_edit(store, info, options, "retry", by)
            raise typer.Exit
    if lookup.belongs_to_program(opened):
        print_message(
            f"run {info.run!r} executes functions of a program; they are tried again once that"
            f" program resumes it{lookup.how_a_program_resumes(opened)}"
        )
    return ExitCode.PAUSED


def _failures_in_question(store: RunStore, info: RunInfo, options: RunOptions) -> list[str]:
    """Return lines about failed tasks that questions decide about, with the answering commands."""
    report = run_status(store, info, SystemClock().now())
    failed = {*report.tasks.failures, *(held.id for held in report.tasks.held)}
    answered = lookup.posted_answers(lookup.read_inbox(store, info.run))
    lines: list[str] = []
    for question in report.questions:
        tasks: dict[str, None] = {}
        for trigger in question.triggers:
            for task_id in trigger.tasks:
                if task_id in failed:
                    tasks[repr(task_id)] = None
        if not tasks:
            continue
        names = join_names(list(tasks), _MAX_ALIKE)
        number = lookup.question_words(question.id)[1]
        if question.id in answered:
            lines.append(f"{names}: the saved answer to question {number} decides")
            continue
        verb = "waits" if len(tasks) == 1 else "wait"
        lines.append(f"{names} {verb} for the answer to question {number}")
        lines.append(f"  {lookup.answering_command(options.store, question)}")
    return lines


def _decide_doubts(
    correction: Correction, not_done: list[str], done: list[str], options: RunOptions
) -> None:
    """Ask about failed tasks that may have taken effect; end the command if the answer is stop.

    Args:
        correction: the retry of failed tasks.
        not_done: gets the tasks to try again.
        done: gets the tasks to skip.
        options: of the command line.
    """
    if not correction.again:
        return
    _print_again(correction)
    _require_terminal(
        options, "check first, and state the result as --not-done TASK or --done TASK"
    )
    for task_id in correction.again:
        question = f"{task_id}: [n]ot done, try it again; [d]one, continue without it; or [s]top"
        answer = ""
        while answer not in ("n", "d", "s"):
            answer = typer.prompt(question, err=True).strip().lower()[:1]
        if answer == "s":
            print_message("nothing was changed")
            raise typer.Exit
        if answer == "n":
            not_done.append(task_id)
        else:
            done.append(task_id)


# Taking effects back


def _is_under_way(engine: ReplanningEngine, run: RunId) -> bool:
    """Return whether a task of a run has yet to take back an effect."""
    return any(effect.is_being_undone for effect in engine.history(run).effects())


def _print_undo(plan: UndoPlan) -> None:
    """Print the effects that no task can take back, and then the diff of the plan."""
    out = console(error=True)
    for effect, why in plan.undecided:
        line = f"  {why}: {effect_line(effect)}"
        out.print(escape_control(line), style="yellow", markup=False)
    for line in plan.diff.splitlines():
        out.print(f"  {escape_control(line)}", style=DIFF_STYLES.get(line[:1], ""), markup=False)


def _undo_json(plan: UndoPlan) -> JsonObject:
    compensations: list[JsonValue] = []
    for task_id, effect in plan.compensations.items():
        compensations.append({"task": task_id, "takes_back": effect_json(effect)})
    undecided: list[JsonValue] = []
    for effect, why in plan.undecided:
        undecided.append({**effect_json(effect), "why": why})
    return {
        "undecided": undecided,
        "compensations": compensations,
        "cancelled": list(plan.cancelled),
        "whole": plan.whole,
        "diff": list(plan.diff.splitlines()),
    }


def _decide_effects(plan: UndoPlan, left: list[str], done: list[str], options: RunOptions) -> None:
    """Ask about effects that no task can take back; end the command if the answer is stop.

    Args:
        plan: the plan of the undo, with these effects.
        left: gets the attempts whose effects stay.
        done: gets the attempts whose effects a person has taken back.
        options: of the command line.
    """
    attempts = [effect.attempt for effect, _ in plan.undecided]
    names = join_names(attempts, _MAX_ALIKE)
    _require_terminal(options, f"decide about each effect with --leave or --by-hand: {names}")
    for effect, _ in plan.undecided:
        question = f"The effect of {effect.attempt}: [l]eave it, taken back by [h]and, or [s]top"
        answer = ""
        while answer not in ("l", "h", "s"):
            answer = typer.prompt(question, err=True).strip().lower()[:1]
        if answer == "s":
            print_message("nothing was changed")
            raise typer.Exit
        if answer == "l":
            left.append(effect.attempt)
        else:
            done.append(effect.attempt)


def _report_edit(store: RunStore, info: RunInfo, options: RunOptions, kind: str, by: str) -> None:
    """Report the outcome of an edit that another process makes.

    Args:
        store: holds the run.
        info: the run before the edit.
        options: of the command line.
        kind: the kind of the message that asks for the edit.
        by: its author.
    """
    from replanning.cli.status import MessageOptions, report_outcome  # other runs need no messages

    place = edit_place(kind, by)
    if kind == "adopt":
        place = adoption_place(by)

    def outcome(bodies: list[RecordBody]) -> str:
        for body in bodies:
            if isinstance(body, PlanRevised):
                is_adoption = body.adopted is not None
                if body.by == by and is_adoption == (kind == "adopt"):
                    return f"revision {body.number}"
            elif isinstance(body, ErrorContained):
                if body.where == place:
                    refuse(f"run {info.run} did not take it: {body.error}")
        return ""

    messages = MessageOptions(store=options.store, json=options.json)
    report_outcome(store, info, outcome, messages, {"asked": kind})
