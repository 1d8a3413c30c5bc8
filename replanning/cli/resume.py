"""The command `resume`, for each kind of run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from replanning.cli import lookup
from replanning.cli.app import (
    RUN_EXIT_CODES_HELP,
    ExitCode,
    Program,
    RunArgument,
    RunOptions,
    epilog,
    fail,
    is_phase_task,
    print_message,
)
from replanning.cli.run import resume_plan
from replanning.errors import JournalCorrupt, NotRunning
from replanning.journal import Record, RunOpened

commands = Program()


@commands.command(
    epilog=epilog(
        "replanning resume latest",
        "replanning resume 20250131-120000-1a2b3c4d5e6f --set context.region=us",
        "replanning resume latest --plan plan.yaml    the plan has literal secrets",
        "replanning resume 20250131-120000-1a2b3c4d5e6f --from 2    a new run of the tasks that revision 2 had left",
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
            help="The plan that the run was opened with, unchanged: literal secrets, which no journal keeps, are taken"
            " from it. --set then repeats what was set when the run was opened.",
        ),
    ] = None,
    options: RunOptions,
) -> None:
    """Resume a run that was paused or stopped, that waits for a person, or whose process died.

    Tasks that have finished are not run again. Of a run that has succeeded, the result is shown again.
    """
    with closing(lookup.open_store(options.store, must_exist=True)) as opened_store:
        info = lookup.find_run(opened_store, run)
        remote = lookup.is_on_temporal(options.store)  # its workers know how to go on
        first = None if remote else next(iter(opened_store.read(info.run)), None)
    if revision is None and info.status == "aborted":
        advice = "start a new run, or one from a revision of this one with --from (0 is the original plan)"
        raise NotRunning(f"run {info.run!r} was aborted: {advice}")
    if revision is None and info.status == "succeeded":
        # A supervisor that resumes whatever it finds takes another code for a failure.
        print_message(f"run {info.run!r} has succeeded; there is nothing to resume")
        if remote or first is None or _is_of_program(first):
            raise typer.Exit(ExitCode.OK)
    if remote:
        if plan_file is not None:
            fail("--plan: on Temporal, the worker has the plan")
        from replanning.cli import temporal  # other runs do not need it

        raise typer.Exit(temporal.resume(info, options, revision))
    if first is None or not isinstance(opened := first.body, RunOpened):
        raise JournalCorrupt(
            f"the journal of run {info.run!r} does not begin with the opening of a run"
        )
    if lookup.belongs_to_program(opened):
        what = (
            "is the session of a program"
            if opened.open_ended
            else "executes functions of a program"
        )
        raise NotRunning(
            f"run {info.run!r} {what}; only that program can go on with it, with run_id={info.run!r}"
        )
    if any(map(is_phase_task, opened.plan.tasks)):
        if plan_file is not None:
            fail(f"--plan: run {info.run!r} is one of planning mode, which has no plan file")
        from replanning.cli.solve import resume_planning  # other runs need no planning mode

        raise typer.Exit(resume_planning(info.run, opened.plan, options, revision))
    raise typer.Exit(resume_plan(info.run, opened, options, revision, plan_file))


def _is_of_program(first: Record) -> bool:
    """Return whether only the program that opened a run can go on with it."""
    return isinstance(first.body, RunOpened) and lookup.belongs_to_program(first.body)
