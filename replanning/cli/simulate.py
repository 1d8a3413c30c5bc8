"""Simulates plans: many runs on a virtual clock, in which tasks fail as they are told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from replanning import Plan, ReplanningEngine
from replanning.cli.options import ExitCode
from replanning.cli.output import console, escape_control, print_json
from replanning.cli.plans import read_plan
from replanning.cli.runner import provider_names
from replanning.cli.setup import read_settings
from replanning.engine.providers import REPAIR_PLUGIN
from replanning.errors import PlanError, Problem, SettingsError
from replanning.llm.selection import AUTO, is_llm
from replanning.testing import Distribution, FaultSchedule, SimulationReport, simulate


def simulate_plan(
    path: str,
    faults: Mapping[str, Sequence[str]],
    *,
    runs: int,
    seed: int,
    workers: int,
    settings: str | None,
    providers: Sequence[str],
    as_json: bool,
) -> int:
    """Simulate runs of a plan and report on them; returns the exit code.

    Args:
        path: the plan file.
        faults: `fail`, `flaky` and `hang` as the command line gives them: `TASK` or `TASK=CHANCE`.
        runs: how many.
        seed: of the first one.
        workers: how many tasks run at once.
        settings: the settings file, if one is named.
        providers: who proposes alternatives, if that is said.
        as_json: whether the report is for a program.

    Raises:
        ReplanningError: plan, faults or settings are not valid.
    """
    plan = read_plan(path)
    loaded = read_settings(settings)
    engine = partial(ReplanningEngine, _simulation_providers(provider_names(providers, loaded)), settings=loaded)
    chances = {kind: _parse_chances(kind, given) for kind, given in faults.items()}
    schedule = _fault_schedule(plan, chances)
    report = simulate(plan, schedule, runs=runs, seed=seed, engine_factory=engine, max_concurrency=workers)
    if as_json:
        print_json(report.document())
    else:
        _print_simulation(report, plan)
    return int(ExitCode.OK if report.success_rate == 1 else ExitCode.FAILED)


def _simulation_providers(names: Sequence[str]) -> list[str]:
    """Who is asked in a simulation: no language models, which know no virtual time, and cost."""
    models = [name for name in names if is_llm(name)]
    if models:
        message = f"a simulation asks no language model such as {', '.join(map(repr, models))}; say repair"
        raise SettingsError([Problem("--replan-provider", message)])
    return [REPAIR_PLUGIN if name == AUTO else name for name in names]


def _parse_chances(kind: str, given: Sequence[str]) -> dict[str, float]:
    chances: dict[str, float] = {}
    problems: list[Problem] = []
    for text in given:
        task, equals, chance = text.rpartition("=")
        try:
            chances[task if equals else text] = float(chance) if equals else 1.0
        except ValueError:
            problems.append(
                Problem(f"--{kind}", f"expected TASK or TASK=CHANCE with a chance from 0 to 1, got {text!r}")
            )
    if problems:
        raise SettingsError(problems)
    return chances


def _fault_schedule(plan: Plan, chances: Mapping[str, Mapping[str, float]]) -> FaultSchedule:
    """What goes wrong; where that does not suit the plan, an option is at fault and not the plan."""
    schedule = FaultSchedule(fail=chances["fail"], flaky=chances["flaky"], hang=chances["hang"])
    try:
        schedule.check(plan)
    except PlanError as error:
        problems = [
            Problem(problem.place.replace("faults.", "--", 1).replace(".", " ", 1), problem.message)
            for problem in error.problems
        ]
        raise SettingsError(problems) from None
    return schedule


def _print_simulation(report: SimulationReport, plan: Plan) -> None:
    out = console()
    count = len(report.runs)
    good = report.success_rate == 1
    out.print(
        f"{escape_control(report.plan)}: {count} simulated runs of {len(plan.tasks)} tasks, nothing was really done"
    )
    out.print(f"  {report.success_rate:.1%} succeeded", style="bold green" if good else "bold red")
    for status, number in report.statuses.items():
        out.print(f"    {number:6} {status}")
    out.print(f"  took       {_format_spread(report.makespan, ' s')}")
    out.print(f"  revisions  {_format_spread(report.revisions)}")
    out.print(f"  questions  {_format_spread(report.questions)}")
    for title, found in (("failed in so many runs", report.failures), ("did not succeed because", report.reasons)):
        if found:
            out.print(f"\n{title}", style="bold")
            for name, number in list(found.items())[:10]:
                out.print(f"  {number:6} {escape_control(name)}")


def _format_spread(spread: Distribution | None, unit: str = "") -> str:
    if spread is None:
        return "-"
    return f"{spread.median:g}{unit} (median), {spread.least:g} to {spread.most:g}{unit}"
