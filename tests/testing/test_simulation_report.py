"""Simulating a plan: what comes out, and that it comes out the same every time."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from replanning import Answer, Plan, PlanRun, ReplanningEngine, Settings, Task
from replanning.errors import PlanError
from replanning.journal import RunStore
from replanning.plan import JsonObject
from replanning.testing import FaultSchedule, SimulationReport, returns, simulate
from tests.support.invariants import invariant_violations
from tests.support.runs import chain, plan

TOOLS = [{"name": "good", "capability": "make"}, {"name": "bad", "capability": "make"}]


def release() -> Plan:
    """A plan in which one tool can stand in for another, and results are handed on."""
    return plan(
        Task(id="build", tool="bad", timeout=100.0),
        Task(
            id="test",
            tool="good",
            arguments={"path": "${build.output.path}"},
            depends_on=("build",),
        ),
        Task(id="tell", tool="good", optional=True, depends_on=("test",)),
        name="release",
        tools=TOOLS,
    )


def check_journals(stores: list[RunStore]) -> None:
    """No journal of a simulated run breaks a promise of the engine."""
    for store in stores:
        assert invariant_violations(list(store.read(store.runs()[0].run))) == []


def keeping(stores: list[RunStore]) -> Callable[..., ReplanningEngine]:
    """Engines with the default providers, whose stores are kept."""

    def make(*, store: RunStore, **parts: Any) -> ReplanningEngine:
        stores.append(store)
        return ReplanningEngine(store=store, **parts)

    return make


def test_nothing_goes_wrong():
    """Without faults every run succeeds, each task takes its second, and nothing is replanned."""
    report = simulate(release(), runs=3)
    assert (report.statuses, report.success_rate) == ({"succeeded": 3}, 1.0)
    assert [
        (run.seed, run.makespan, run.revisions, run.questions, run.failures) for run in report.runs
    ] == [(seed, 3.0, 0, 0, {}) for seed in range(3)]
    assert repr(report) == "<SimulationReport of 'release': 3 succeeded, 3 s>"


def test_plan_repairs_itself():
    """A task that always fails is done by another tool in every run, and not without replanning."""
    faults = FaultSchedule(fail={"build": 1.0}, durations={"*": (1, 9), "build": 20})
    report = simulate(release(), faults, runs=10)
    assert (report.success_rate, report.failures) == (1.0, {"build": 10})
    assert {run.revisions for run in report.runs} == {1}
    alone = partial(ReplanningEngine, settings=Settings(enabled=False))
    without = simulate(release(), faults, runs=10, engine_factory=alone)
    assert without.reasons == {"'build' failed (task 'build' was made to fail)": 10}
    assert without.makespan is None
    assert repr(without) == "<SimulationReport of 'release': 10 failed>"


def test_equal_arguments_give_equal_reports():
    """A report depends on the arguments alone, and each of its runs can be had again by its seed."""
    faults = FaultSchedule(
        fail={"bad": 0.3},
        flaky={"*": 0.2},
        hang={"build": 0.2},
        durations={"*": (1, 60)},
        store_fail=0.05,
    )
    stores: list[RunStore] = []
    report = simulate(release(), faults, runs=20, seed=5, engine_factory=keeping(stores))
    assert report == simulate(release(), faults, runs=20, seed=5)
    assert report != simulate(release(), faults, runs=20, seed=6)
    check_journals(stores)
    for run in report.runs[:5]:
        assert simulate(release(), faults, runs=1, seed=run.seed).runs == (run,)


def test_faults_around_the_engine():
    """Providers that fail or hang and a store with outages are survived, and break no promise."""
    faults = FaultSchedule(
        fail={"build": 1.0},
        provider_fail=0.3,
        provider_hang=0.3,
        store_fail=0.1,
        store_outage=(0.5, 5),
    )
    stores: list[RunStore] = []
    report = simulate(release(), faults, runs=60, engine_factory=keeping(stores))
    check_journals(stores)
    assert set(report.statuses) <= {"succeeded", "failed", "needs_human"}
    assert 0.2 < report.success_rate < 0.8


def test_people_and_happenings():
    """People answer when they are asked, and what happens from outside happens at its time."""
    seen: list[int] = []

    def look(run: PlanRun) -> None:
        seen.append(sum(task.state == "DONE" for task in run.view.tasks()))
        run.change_context({"region": "eu"})

    approval = Settings.model_validate({"alternatives": {"require_approval": True}})
    cautious = partial(ReplanningEngine, settings=approval)
    broken = FaultSchedule(fail={"build": 1.0})
    assert simulate(release(), broken, engine_factory=cautious, runs=1).statuses == {
        "needs_human": 1
    }
    answers = [returns(Answer("approve", by="ada"), after=60)]
    faults = FaultSchedule(fail={"build": 1.0}, events=[(2.0, look), (1e9, look)], answers=answers)
    report = simulate(release(), faults, runs=2, engine_factory=cautious)
    assert (report.success_rate, seen) == (1.0, [0, 0])
    assert [(run.questions, run.makespan) for run in report.runs] == [(1, 64.0), (1, 64.0)]


def test_runs_that_go_astray():
    """A run that does not end counts as stuck, and one that raises as crashed, each with the reason."""
    stuck = simulate(chain("a"), FaultSchedule(hang={"a": 1.0}), runs=1, time_limit=3_600)
    assert stuck.statuses == {"stuck": 1}
    assert "had not ended after 3600 s" in stuck.runs[0].reason
    assert stuck.runs[0].makespan == 3_600

    def clumsy(run: PlanRun) -> None:
        run.cancel_task("nobody")

    crashed = simulate(chain("a"), FaultSchedule(events=[(0.5, clumsy)]), runs=1)
    assert crashed.statuses == {"crashed": 1}
    assert "after 0.5 s raised ChangeRejected" in crashed.runs[0].reason
    assert "there is no task 'nobody'" in crashed.runs[0].reason


def test_outputs_suit_references():
    """Tasks return what others look for in their output, unless the schedule says what they return."""
    reading = Task(
        id="b", arguments={"a": "${a.output.x.y}", "b": "x ${a.output.z}"}, depends_on=("a",)
    )
    wanting = plan(
        Task(id="a"), reading, Task(id="c", when="results.a.count > 3", depends_on=("a",))
    )
    assert simulate(wanting, runs=1).statuses == {"failed": 1}
    outputs: JsonObject = {"a": {"x": {"y": 1}, "z": 2, "count": 5}}
    assert simulate(wanting, FaultSchedule(outputs=outputs), runs=1).statuses == {"succeeded": 1}


def test_lists_have_three_elements():
    """A list that only a real run knows has three elements, with the fields that are read; faults of its task are theirs."""
    each = Task(
        id="b",
        depends_on=("a",),
        for_each="${a.output.rows}",
        key="${item.id}",
        arguments={"path": "${item.path}"},
        on_item_failure="skip",
    )
    listed = plan(Task(id="a"), each, Task(id="c", depends_on=("b",)))
    (run,) = simulate(listed, runs=1).runs
    assert (run.status, run.makespan, run.revisions) == ("succeeded", 3.0, 0)
    (run,) = simulate(listed, FaultSchedule(fail={"b": 1.0}), runs=1).runs
    assert run.status == "succeeded"
    assert run.failures == {"b[id-0]": 1, "b[id-1]": 1, "b[id-2]": 1}


def test_schedules_are_checked():
    """A schedule that names what the plan lacks is refused, and every offender is named with its place."""
    with pytest.raises(PlanError) as refused:
        simulate(release(), FaultSchedule(fail={"biuld": 1.0}, durations={"tset": 5}))
    places = [problem.place for problem in refused.value.problems]
    assert places == ["faults.fail", "faults.durations"]
    assert "'biuld'" in str(refused.value)


def test_report_as_json():
    """A report is one JSON object with a summary and every run."""
    report = simulate(release(), FaultSchedule(fail={"build": 1.0}), runs=2)
    document = json.loads(report.to_json())
    assert document == report.document()
    summary = {
        name: document[name] for name in ("plan", "count", "statuses", "success_rate", "failures")
    }
    assert summary == {
        "plan": "release",
        "count": 2,
        "statuses": {"succeeded": 2},
        "success_rate": 1.0,
        "failures": {"build": 2},
    }
    assert document["makespan"] == {"least": 4.0, "median": 4.0, "most": 4.0, "mean": 4.0}
    assert [run["seed"] for run in document["runs"]] == [0, 1]
    nothing = SimulationReport("none", ())
    assert (nothing.success_rate, nothing.makespan) == (0.0, None)
    assert repr(nothing) == "<SimulationReport of 'none': no runs>"


def test_expectations_that_are_not_checked() -> None:
    """No commands are run in a simulation, and no second tool is: an attempt has the outcome that the faults say."""
    expecting = Plan.parse("""
        goal: {objective: x}
        tools:
          - {name: t, capability: c, expect: {commands: [make], agrees_with: u}}
          - {name: u, capability: c, effect: none}
        tasks: [{id: a, tool: t}]
    """)
    assert simulate(expecting, runs=1).success_rate == 1.0
