"""The seven detectors: what is worth replanning, and what is not."""

import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import anyio
import pytest

from replanning import (
    Plan,
    PlanMonitor,
    PlanRun,
    ReplanningEngine,
    RunResult,
    Settings,
    Task,
    TransientError,
    journal,
    open_run,
)
from replanning.changes import SkipTask
from replanning.config import load_settings
from replanning.errors import SettingsError
from replanning.history import export_history, import_history
from replanning.journal import DecisionMade, RunStore, TriggerFired, Usage, UsageCharged
from replanning.journal.records import TriggerKind, normalised_cause
from replanning.live import PlanView
from replanning.plugins import installed_plugins
from replanning.testing import (
    ScriptedExecutor,
    ScriptedProvider,
    ScriptStep,
    VirtualClock,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from tests.support.runs import Proposer, alternative, bodies, failing

ALL = get_args(TriggerKind)

Script = dict[str, ScriptStep | list[ScriptStep]]


def made(tasks: str, **fields: object) -> Plan:
    """A plan of tasks written as in a plan file."""
    text = "".join(
        f"{name}: {value}\n" for name, value in {"goal": "{objective: test}", **fields}.items()
    )
    return Plan.parse(f"{text}tasks:\n{tasks}")


def fired(engine: ReplanningEngine, run: str) -> list[Any]:
    """The triggers of a run, in order."""
    return [body.trigger for body in bodies(engine.store, run, TriggerFired)]


@asynccontextmanager
async def watched(
    plan: Plan, **settings: object
) -> AsyncIterator[tuple[PlanRun, Callable[[], list[Any]]]]:
    """A run that is worked by hand, with all kinds enabled, and a way to ask for its triggers so far."""
    engine = ReplanningEngine([], settings=Settings.model_validate({"triggers": ALL, **settings}))
    async with engine.open(plan) as run:
        yield run, lambda: fired(engine, run.id)
        run.pause()
    assert not [body for body in bodies(engine.store, run.id) if body.kind == "contained"]


def done(run: PlanRun, *tasks: str) -> None:
    """Report that tasks have been done."""
    for task in tasks:
        run.succeeded(run.started(task))


async def executed(plan: Plan, script: Script) -> list[Any]:
    """The triggers of a run from beginning to end, in which nobody proposes anything."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [ScriptedProvider()], environment=virtual_environment(clock=clock)
        )
        result = await engine.execute(plan, ScriptedExecutor(script, clock=clock))
    return fired(engine, result.run)


async def failures(plan: Plan, script: Script) -> list[Any]:
    """The triggers of such a run, without the one for its end."""
    return [
        trigger for trigger in await executed(plan, script) if trigger.kind != "goal-unreachable"
    ]


# task-failed


async def test_failure_tells_everything():
    """A failed task gives one trigger that says which, why, how often it was tried, and in one sentence."""
    plan = made("  - {id: build, tool: make}\n  - {id: test, depends_on: [build]}")
    (trigger,) = await failures(plan, {"build": raises(OSError("disk full"))})
    assert (trigger.kind, trigger.tasks, trigger.root) == ("task-failed", ("build",), "build")
    assert (trigger.error_type, trigger.message) == ("OSError", "disk full")
    assert (trigger.attempts, trigger.transient, trigger.interrupted) == (1, False, False)
    assert trigger.reason == "task 'build' with 'make' failed: OSError: disk full"


async def test_failure_waits_for_the_last_attempt():
    """Errors that may pass give no trigger while the task is run again by itself, as often as it may be, and one afterwards."""
    plan = made("  - {id: fetch}\n  - {id: twice, retry: {max_attempts: 2}}")
    busy = raises(TransientError("busy"))
    twice, trigger = sorted(
        await failures(plan, {"fetch": busy, "twice": busy}), key=lambda trigger: trigger.attempts
    )
    assert (twice.attempts, trigger.attempts, trigger.transient) == (2, 3, True)
    assert trigger.reason == "task 'fetch' failed after 3 attempts: TransientError: busy"
    assert await failures(plan, {"fetch": [busy, raises(TransientError), returns()]}) == []


@pytest.mark.parametrize(("idempotent", "expected"), [(False, [True]), (True, [])])
async def test_interruption_is_a_failure_of_its_own_kind(idempotent, expected):
    """A worker that is cancelled gives a trigger that says so; an idempotent task is simply run again."""
    async with watched(made(f"  - {{id: pay, idempotent: {idempotent}}}")) as (run, found):
        with anyio.CancelScope() as scope:
            async for task in run.ready():
                async with run.attempt(task):
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
        assert [trigger.interrupted for trigger in found()] == expected


@pytest.mark.parametrize(
    ("task", "error", "reason"),
    [
        (
            "when: context.a",
            "ConditionError",
            "the condition of task 'post' cannot be evaluated: condition 'context.a'",
        ),
        (
            "arguments: {to: '${context.a}'}",
            "ArgumentError",
            "task 'post' cannot be given its arguments: ${context.a}",
        ),
    ],
)
async def test_what_does_not_exist(task, error, reason):
    """A condition or reference that finds nothing gives a trigger that names it, though the task has never run."""
    (trigger,) = await failures(made(f"  - {{id: post, {task}}}"), {})
    assert (trigger.kind, trigger.error_type) == ("task-failed", error)
    assert trigger.reason.startswith(reason)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("tool: a", "tool: a", True),
        ("tool: tool-1", "tool: tool-2", False),
        ("tool: a, arguments: {n: 1}", "tool: a, arguments: {n: 2}", False),
        ("tool: a, arguments: {n: 1}", "tool: a, arguments: {n: 1}", True),
    ],
)
async def test_same_call_same_cause(one, other, same):
    """The same call failing in the same way is the same cause, whatever numbers the error names; no other is."""
    causes = set()
    for fields, pid in ((one, 17), (other, 4711)):
        script: Script = {"build": raises(OSError(f"process {pid} died at 0x7f{pid}"))}
        causes |= {
            trigger.cause
            for trigger in await failures(made(f"  - {{id: build, {fields}}}"), script)
        }
    assert (len(causes) == 1) is same


# timeout


async def test_timeout():
    """An attempt that runs into its deadline gives `timeout`, which names the limit, once no retry is left."""
    plan = made("  - {id: build, tool: make, timeout: 5}")
    (trigger,) = await failures(plan, {"build": hangs()})
    assert (trigger.kind, trigger.tasks, trigger.root, trigger.timeout) == (
        "timeout",
        ("build",),
        "build",
        5.0,
    )
    assert trigger.reason == "task 'build' with 'make' did not finish within 5 s"
    plan = made("  - {id: build, timeout: 5, idempotent: true}")
    assert await failures(plan, {"build": [hangs(), returns()]}) == []
    assert [trigger.kind for trigger in await failures(plan, {"build": hangs()})] == ["timeout"]


# context-changed


async def test_context_change_names_who_reads_it():
    """A changed key triggers for the tasks that still have to run and read it, in arguments or condition."""
    tasks = """
  - {id: before, arguments: {in: "${context.region}"}}
  - {id: running, arguments: {in: "${context.region}"}, depends_on: [before]}
  - {id: after, arguments: {in: "${context.region}"}, depends_on: [running]}
  - {id: maybe, when: context.region == "eu", depends_on: [running]}
  - {id: other, arguments: {in: "${context.colour}"}, depends_on: [running]}
"""
    async with watched(made(tasks, context="{region: eu, colour: red}")) as (run, found):
        done(run, "before")
        run.started("running")
        run.change_context({"region": "us"})
        (trigger,) = found()
    assert (trigger.kind, trigger.tasks) == ("context-changed", ("after", "maybe"))
    assert (trigger.keys, trigger.facts) == (("region",), ())
    assert trigger.reason == "context.region changed, and 2 tasks depend on it: 'after', 'maybe'"


async def test_skipped_task_is_named_when_its_condition_holds():
    """A task that its condition skipped is named once the condition holds; one that somebody skipped is not."""
    plan = made(
        "  [{id: post, when: context.n > 2}, {id: not, when: context.n > 2, depends_on: [a]}, {id: a}]",
        context="{n: 0}",
    )
    async with watched(plan) as (run, found):
        run.apply([SkipTask(task_id="not")])
        assert (await anext(run.ready())).id == "a"
        run.change_context({"n": 1})
        run.change_context({"n": "many"})
        run.change_context({}, removed=["n"])
        assert found() == []
        run.change_context({"n": 3})
        assert [trigger.tasks for trigger in found()] == [("post",)]


FACTS = """[
  {name: pick, parameters: {x: string}, requires: ["clear({x})", handempty], adds: ["holding({x})"], removes: [handempty]},
  {name: put, parameters: {x: string}, requires: ["holding({x})"], adds: [handempty, "clear({x})"], removes: ["holding({x})"]},
  {name: print, needs: [paper], produces: [report]}]"""
BLOCKS = {"tools": FACTS, "facts": "[clear(a), clear(b), handempty]"}


async def test_fact_that_ceases_and_is_needed():
    """A fact that ceases triggers for the task that needs it and has nothing before it that adds it."""
    tasks = "  - {id: a, tool: pick, arguments: {x: a}}\n  - {id: b, tool: put, arguments: {x: a}, depends_on: [a]}"
    async with watched(made(tasks, **BLOCKS)) as (run, found):
        run.observe(ceased=["clear(b)"])
        run.observe(ceased=["clear(a)"])
        (trigger,) = found()
    assert (trigger.kind, trigger.tasks, trigger.facts, trigger.keys) == (
        "context-changed",
        ("a",),
        ("clear(a)",),
        (),
    )
    assert trigger.reason == "clear(a) no longer holds, and 1 task depends on it: 'a'"


async def test_fact_of_the_goal_that_is_lost():
    """A fact that the goal needs triggers when nothing that is left makes it hold again."""
    goal = "{objective: t, facts: [artifact(report)]}"
    tasks = "  - {id: print, tool: print}\n  - {id: send, depends_on: [print]}"
    plan = made(tasks, goal=goal, facts="[artifact(paper)]", tools=FACTS)
    async with watched(plan, triggers=("context-changed",)) as (run, found):
        run.observe(holds=["artifact(report)"])
        run.observe(ceased=["artifact(report)"])
        assert found() == []
        done(run, "print")
        run.observe(ceased=["artifact(report)"])
        (trigger,) = found()
    assert (trigger.tasks, trigger.facts) == ((), ("artifact(report)",))
    assert trigger.reason == "artifact(report) no longer holds, and the goal needs it"


async def test_fact_that_comes_back_by_itself():
    """A fact that a task on the way, or its replacement, adds again triggers nothing, however far before its use."""
    tasks = """
  - {id: up, tool: pick, arguments: {x: a}}
  - {id: down, tool: put, arguments: {x: a}, depends_on: [up]}
  - {id: rest, depends_on: [down]}
  - {id: next, tool: pick, arguments: {x: b}, depends_on: [rest]}
"""
    async with watched(made(tasks, **BLOCKS), triggers=("context-changed",)) as (run, found):
        done(run, "up")
        run.observe(holds=["handempty"])
        run.observe(ceased=["handempty"])
        assert found() == []
        run.observe(holds=["handempty"])
        run.replace_task("down", Task(id="lower", tool="put", arguments={"x": "a"}))
        run.observe(ceased=["handempty"])
        assert found() == []
        run.replace_task("lower", Task(id="throw"))
        run.observe(holds=["handempty"])
        run.observe(ceased=["handempty"])
        assert [trigger.tasks for trigger in found()] == [("throw", "rest", "next")]


async def test_fact_that_nobody_can_tell_to_be_needed():
    """A task whose arguments come from a result that does not exist yet is not taken to need a fact."""
    tasks = "  - {id: find}\n  - {id: a, tool: pick, arguments: {x: '${find.output}'}, depends_on: [find]}"
    async with watched(made(tasks, tools=FACTS, facts="[clear(a)]")) as (run, found):
        run.observe(ceased=["clear(a)"])
        assert found() == []


# resource-changed

TOOLS = "[{name: a, resources: {cpu: 2}}, {name: b}, {name: c, available: false}]"


async def test_resource_that_shrinks():
    """A capacity or tool triggers once a waiting task lacks it, also from the start; growth and enough of it do not."""
    plan = made(
        "  [{id: t, tool: a}, {id: u, tool: b}, {id: v, tool: c}]",
        tools=TOOLS,
        resources="{cpu: 8}",
    )
    async with watched(plan) as (run, found):
        assert [(trigger.kind, trigger.tasks) for trigger in found()] == [
            ("resource-changed", ("v",))
        ]
        run.change_resource("cpu", capacity=16)
        run.change_resource("cpu", capacity=2)
        run.change_resource("a", available=True)
        run.change_resource("cpu", capacity=1)
        run.change_resource("b", available=False)
        _, small, gone = found()
    assert (small.tasks, small.name, small.capacity, small.available) == (("t",), "cpu", 1.0, None)
    assert small.reason == "'cpu' is down to 1, and 1 waiting task needs it: 't'"
    assert (gone.tasks, gone.name, gone.capacity, gone.available) == (("u",), "b", None, False)
    assert gone.reason == "'b' is unavailable, and 1 waiting task needs it: 'u'"


@pytest.mark.parametrize(
    ("stated", "used"), [({"effect": "none"}, ["a", "b"]), ({"idempotent": True}, ["a"])]
)
async def test_tool_that_goes_during_its_attempt(stated, used):
    """A tool that becomes unavailable while its task runs is replaced once the attempt failed, if the task only reads."""
    plan = Plan.model_validate(
        {
            "goal": {"objective": "o"},
            "tools": [{"name": "a", "capability": "c"}, {"name": "b", "capability": "c"}],
            "tasks": [{"id": "x", "tool": "a", **stated}],
        }
    )
    seen: list[str] = []
    async with VirtualClock(), ReplanningEngine(["repair"]).open(plan) as run:
        async for task in run.ready():
            async with run.attempt(task):
                seen.append(task.tool or "")
                if task.tool == "a":
                    run.change_resource("a", available=False)
                    raise ConnectionResetError("the server has ended")
    assert seen == used
    assert run.result.ok == ("b" in used)


# better-path-found

DEAR = "\n".join(f"  - {{id: t{i}, tool: dear}}" for i in range(5))


@pytest.mark.parametrize(
    ("rest", "settings", "picky", "gain"),
    [(4.0, {}, False, 0.5), (100.0, {}, False, 0), (100.0, {"min_gain": 0.05}, False, 0.1), (4.0, {"every": 4}, False, 0),
     (4.0, {}, True, 0)],
    ids=["half of what is left", "less than the minimum", "a lower minimum", "not yet", "a tool that needs more"],
)  # fmt: skip
async def test_better_path(rest, settings, picky, gain):
    """A cheaper tool that fits triggers after every so many successes, if it saves the minimum share of what is left."""
    tools = f"""[{{name: dear, capability: c, cost: 10}}, {{name: cheap, capability: c, cost: 4, available: false}},
      {{name: rest, cost: {rest}}}, {{name: picky, capability: c, cost: 1, parameters: {{colour: string}}}}]"""
    async with watched(
        made(f"{DEAR}\n  - {{id: rest, tool: rest}}", tools=tools), better_path=settings
    ) as (
        run,
        found,
    ):
        done(run, "t0", "t1")
        run.change_resource("cheap", available=True)
        run.change_resource("picky", available=picky)
        done(run, "t2")
    reason = f"'cheap' can take over 2 waiting tasks from 'dear' and makes the remaining plan {gain:.0%} cheaper"
    expected = [(("t3", "t4"), "cheap", reason)] if gain else []
    assert [(trigger.tasks, trigger.tool, trigger.reason) for trigger in found()] == expected


SHORTCUTS = {
    "facts": "[]",
    "resources": "{gpu: 0}",
    "tools": """[{name: fetch, produces: [pages]}, {name: read, needs: [pages], produces: [summary]}, {name: print},
      {name: cache, available: false, produces: [pages]}, {name: scan, resources: {gpu: 1}, produces: [text]}, {name: digest, needs: [text], produces: [summary]},
      {name: lookup, requires: ["key({k})"], adds: ["artifact({k})"], parameters: {k: string}}]""",
}


@pytest.mark.parametrize(
    ("news", "tasks"),
    [
        ({"holds": ["artifact(pages)"]}, ("fetch", "read")),
        ({"holds": ["artifact(summary)"]}, ("read",)),
        ({"holds": ["key(summary)"]}, ("fetch", "read")),
        ({"holds": ["weather(fine)"]}, ()),
        ({"ceased": ["artifact(none)"], "holds": ["artifact(other)"]}, ()),
        ({"name": "gpu", "capacity": 1}, ("read",)),
        ({"name": "gpu", "capacity": 0.5}, ()),
        ({"name": "read", "available": False}, ()),
        ({"name": "cache", "available": True}, ("fetch", "read")),
        ({"name": "print", "available": True}, ()),
    ],
)
async def test_possible_shortcuts(news, tasks):
    """What changes triggers where effects of waiting tasks hold by it, or tools could achieve them with it otherwise."""
    document = made(
        "  - {id: fetch, tool: fetch}\n  - {id: read, tool: read}\n  - {id: print, tool: print}",
        **SHORTCUTS,
    )
    for facts in ("[]", None):
        plan = document if facts else document.model_copy(update={"facts": None})
        async with watched(plan, triggers=("better-path-found",)) as (run, found):
            run.change_resource(**news) if "name" in news else run.observe(**news)
            assert [(t.tasks, t.tool) for t in found()] == (
                [(tasks, "")] if tasks and facts else []
            )


async def test_better_path_has_its_own_time():
    """Alternatives for a better path are waited for no longer than its cap, while all others have a replan's time."""
    tools = "[{name: dear, capability: c, cost: 10}, {name: cheap, capability: c, cost: 4}]"
    plan = made(DEAR, tools=tools, sequential="true")
    patience: dict[str, float] = {}

    def propose(request):
        patience[request.triggers[0].kind] = request.deadline - clock.now()
        return []

    async with VirtualClock() as clock:
        settings = Settings.model_validate({"triggers": ALL, "better_path": {"time_cap": 2}})
        environment = virtual_environment(clock=clock)
        engine = ReplanningEngine(
            [ScriptedProvider(propose)], settings=settings, environment=environment
        )
        await engine.execute(plan, ScriptedExecutor({}, clock=clock, default=returns(after=1)))
        await engine.execute(plan, ScriptedExecutor({"t0": raises(ValueError)}, clock=clock))
    assert (patience["better-path-found"], patience["task-failed"]) == (2, settings.timeout.replan)


# human-request and goal-unreachable


async def test_person_asks():
    """A request names who asks, why, and the tasks they mean, if any; nothing has to have failed."""
    async with watched(made("  - {id: a}")) as (run, found):
        run.request_replan("use the mirror", by="ada", tasks=["a"])
        run.request_replan("look again")
        one, two = found()
    assert (one.tasks, one.by, one.reason) == (
        ("a",),
        "ada",
        "ada asked for replanning: use the mirror",
    )
    assert (two.tasks, two.by, two.reason) == ((), "", "a person asked for replanning: look again")


async def test_a_person_asks_the_same_of_several_tasks():
    """A request in the same words about another task is another request, and not put off as a repetition."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine(
            [ScriptedProvider()], environment=virtual_environment(clock=clock)
        )
        async with engine.open(made("  - {id: a}\n  - {id: b}\n  - {id: c}")) as run:
            for task_id in ("a", "b", "c", "c"):
                run.request_replan("use the mirror", by="ada", tasks=[task_id])
                await clock.sleep(1)
            run.pause()
    decided = [body.triggers for body in bodies(engine.store, run.id, DecisionMade)]
    assert decided == [("t1",), ("t2",), ("t3",)]


FAILS: Script = {"a": raises(OSError("disk full"))}


@pytest.mark.parametrize(
    ("plan", "script", "tasks", "why"),
    [
        (
            made("  [{id: a}, {id: b, depends_on: [a]}, {id: c}]"),
            FAILS,
            ("a",),
            "2 required tasks cannot be done ('a' is FAILED)",
        ),
        (
            made(
                "  [{id: a, tool: t, optional: true}, {id: b, depends_on: [a]}]",
                tools="[{name: t, available: false}]",
            ),
            {},
            ("a",),
            "1 required task cannot be done ('a' is READY)",
        ),
        (
            made("  [{id: a}]", goal="{objective: t, facts: [artifact(x)]}"),
            {},
            (),
            "the goal lacks artifact(x)",
        ),
    ],
    ids=["a failed task", "a missing tool", "missing facts"],
)
async def test_goal_unreachable(plan, script, tasks, why):
    """A run that stands still short of its goal gives one trigger that names what holds it up."""
    (trigger,) = [
        trigger for trigger in await executed(plan, script) if trigger.kind == "goal-unreachable"
    ]
    assert (trigger.tasks, trigger.reason) == (tasks, f"nothing can run any more: {why}")
    assert trigger.missing_facts == (() if tasks else ("artifact(x)",))


async def test_goal_unreachable_cause_is_what_holds_it_up():
    """The same tasks stuck in the same way are the same cause, whatever numbers the error names; others are not."""
    plan = made("  - {id: a}\n  - {id: b}")
    scripts: list[Script] = [
        {name: raises(OSError(f"process {pid}"))} for name, pid in (("a", 17), ("a", 23), ("b", 17))
    ]
    one, same, other = [(await executed(plan, script))[-1].cause for script in scripts]
    assert one == same != other


# which detectors there are


async def test_detectors_are_plugins():
    """Our seven detectors are found as anyone's are, under the kind of their triggers, and pass over other observations."""
    found = {point.name: point.load() for point in entry_points(group="replanning.triggers")}
    assert {name: found[name].name for name in ALL} == {name: name for name in ALL}
    async with open_run(made("  - {id: a}")) as run:
        for detector in found.values():
            assert list(detector().detect(UsageCharged(Usage()), run.view)) == []


@pytest.mark.parametrize("kind", ALL)
async def test_each_kind_can_be_disabled(kind):
    """A kind that the settings leave out gives no trigger, and the others still do."""
    tasks = """
  - {id: fails}
  - {id: hangs, timeout: 5, effect: none, retry: {max_attempts: 1}}
  - {id: reads, arguments: {v: "${context.x}"}, depends_on: [hangs]}
  - {id: uses, tool: t, depends_on: [hangs]}
"""
    async with VirtualClock() as clock:
        settings = Settings.model_validate({"triggers": [name for name in ALL if name != kind]})
        engine = ReplanningEngine(
            [], settings=settings, environment=virtual_environment(clock=clock)
        )
        async with engine.open(made(tasks, context="{x: 1}", tools="[{name: t}]")) as run:
            run.failed(run.started("fails"), OSError("no"))
            run.started("hangs")
            run.request_replan("please")
            run.change_context({"x": 2})
            run.change_resource("t", available=False)
            await clock.sleep(6)
            run.pause()
    assert {trigger.kind for trigger in fired(engine, run.id)} == {*ALL} - {
        kind,
        "better-path-found",
    }


# detectors of others

PAGE = Path(__file__).parents[2] / "docs/how-to/plugins.md"
UNREAD = """
from replanning.journal import TriggerEvent
class UnreadKind(TriggerEvent):
    kind: str = "unread-kind"
    number: int
"""


@pytest.fixture
def warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder into which somebody installed a detector with a kind of trigger of its own."""
    folder = tmp_path / "site"
    info = folder / "warned-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: warned\nVersion: 1.0\n")
    points = "[replanning.triggers]\nwarning-found = warned:WarningDetector\n"
    points += "warnings = warned:WarningDetector\nunread-kind = unread:UnreadKind\nbroken-kind = nowhere:Detector\n"
    (info / "entry_points.txt").write_text(points)
    (folder / "unread.py").write_text(UNREAD)
    section = PAGE.read_text(encoding="utf-8").partition("## Detectors\n")[2]
    (folder / "warned.py").write_text(section.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(folder))
    installed_plugins.cache_clear()
    yield folder
    sys.modules.pop("warned", None)
    installed_plugins.cache_clear()


async def test_kinds_of_others(warned):
    """A trigger of an installed kind is journaled without secrets, read back in its class, and decided after a resume."""
    settings = Settings.model_validate(
        {"triggers": ["warnings"], "approval": {"always_for": ["warning-found"]}}
    )
    tasks = made("  - {id: a}\n  - {id: b}")
    async with VirtualClock() as clock:
        slow = ScriptedProvider(lambda request: returns([], after=100), clock=clock)
        environment = virtual_environment(clock=clock)
        engine = ReplanningEngine(
            [slow],
            settings=settings,
            store=journal.SqliteStore(warned / "runs"),
            environment=environment,
        )
        async with engine.open(tasks) as run:
            run.succeeded(run.started("a"), "warning: key sk-abcdefghijklmnopqrstuvwxyz")
            await clock.sleep(1)
            run.pause()
        engine.store.close()
        provider = Proposer(lambda request: [alternative(SkipTask(task_id="b"))])
        store = journal.SqliteStore(warned / "runs")
        engine = ReplanningEngine(
            [provider], settings=settings, store=store, environment=environment
        )
        async with engine.resume(run.id) as resumed:
            await clock.sleep(1)
            resumed.pause()
    (trigger,) = fired(engine, run.id)
    (request,) = provider.requests
    (question,) = engine.pending(run.id)
    (event,) = engine.history(run.id).filter(trigger="warning-found")
    assert type(trigger) is sys.modules["warned"].WarningFound
    assert (trigger.text, trigger.tasks) == ("warning: key [redacted]", ("b",))
    assert request.triggers == question.triggers == event.triggers == (trigger,)
    store.close()


async def detected_by(
    found: Callable[[PlanView], Any], store: RunStore
) -> tuple[ReplanningEngine, RunResult]:
    """A run of two tasks under a detector, which finds something after each of them."""
    detector: Any = SimpleNamespace(
        name="odd", observes=(journal.AttemptSucceeded,), detect=lambda body, view: [found(view)]
    )
    engine = ReplanningEngine(
        [Proposer(lambda request: [])], monitor=PlanMonitor([detector]), store=store
    )
    return engine, await engine.execute(
        made("  - {id: a}\n  - {id: b}"), failing(), max_concurrency=1
    )


async def test_kinds_without_a_class(tmp_path):
    """A trigger whose class is not there is read with every field, as the detector of an object may fire it."""
    fields = {"kind": "lull", "reason": "quiet", "minutes": 3, "password": "hunter2!"}
    engine, run = await detected_by(
        lambda view: journal.TriggerEvent.model_validate(fields),
        journal.SqliteStore(tmp_path / "runs"),
    )
    trigger, _ = fired(engine, run.run)
    assert (type(trigger), trigger.model_extra) == (
        journal.TriggerEvent,
        {"minutes": 3, "password": "[redacted]"},
    )
    found = engine.history(run.run)
    assert (found.metrics.replans, import_history(export_history(found)).events) == (
        1,
        found.events,
    )
    engine.store.close()


async def test_misbehaving_detectors(tmp_path):
    """A detector that gives what is no trigger, or one that no journal can hold, is noted and harms nothing else."""
    endless = journal.TaskTimedOut(timeout=math.inf)
    engine, run = await detected_by(
        lambda view: view.task("b").attempts or endless, journal.SqliteStore(tmp_path / "runs.db")
    )
    contained = bodies(engine.store, run.run, journal.ErrorContained)
    assert ([body.where for body in contained], run.status) == (["detector 'odd'"] * 2, "succeeded")


def test_unknown_kinds_in_settings(warned):
    """Settings take the kinds of installed detectors from every source, and refuse others with the nearest one."""
    environ = {
        "REPLANNING_TRIGGERS": "timeout,warning-found",
        "REPLANNING_APPROVAL__ALWAYS_FOR": "warning-found",
    }
    settings = load_settings(environ=environ).settings
    assert (settings.triggers, settings.approval.always_for) == (
        ("timeout", "warning-found"),
        ("warning-found",),
    )
    with pytest.raises(
        SettingsError,
        match=r"with this name; did you mean 'warning-found'[?] known detectors are task-failed, ",
    ):
        load_settings(environ={"REPLANNING_TRIGGERS": "warning-fund"})


def test_cause_in_short():
    """A cause is one short text of its parts, without the numbers and addresses that vary by occasion."""
    assert (
        normalised_cause("OSError", "", None, "port 8080 at 0x7f3a, run deadbeef42")
        == "OSError:port # at #, run #"
    )
    assert len(normalised_cause("x" * 500)) == 200
