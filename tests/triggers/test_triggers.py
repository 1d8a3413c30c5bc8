"""The seven detectors: what is worth replanning, and what is not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import entry_points

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import (
    Alternative,
    Plan,
    PlanRun,
    ReplanningEngine,
    ReplanRequest,
    Settings,
    Task,
    TransientError,
    open_run,
)
from replanning.changes import RetryTask, SkipTask
from replanning.journal import (
    BetterPathFound,
    ContextChanged,
    DecisionMade,
    GoalUnreachable,
    HumanRequest,
    ResourceChanged,
    TaskFailed,
    TaskTimedOut,
    Trigger,
    TriggerFired,
    Usage,
    UsageCharged,
    normalised_cause,
)
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
from tests.support.runs import bodies

ALL = (
    "task-failed",
    "timeout",
    "context-changed",
    "better-path-found",
    "human-request",
    "goal-unreachable",
    "resource-changed",
)


Found = Callable[[], list[Trigger]]
Script = dict[str, ScriptStep | list[ScriptStep]]


def made(tasks: str, **fields: object) -> Plan:
    """A plan of tasks written as in a plan file."""
    text = "goal: {objective: test}\n" + "".join(f"{name}: {value}\n" for name, value in fields.items())
    return Plan.parse(f"{text}tasks:\n{tasks}")


def fired(engine: ReplanningEngine, run: str) -> list[Trigger]:
    """The triggers of a run, in order, without the one for its end."""
    found = [body.trigger for body in bodies(engine.store, run) if isinstance(body, TriggerFired)]
    return [trigger for trigger in found if trigger.kind != "goal-unreachable"]


@asynccontextmanager
async def watched(plan: Plan, **settings: object) -> AsyncIterator[tuple[PlanRun, Found]]:
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


async def executed(plan: Plan, script: Script, **settings: object) -> list[Trigger]:
    """The triggers of a run from beginning to end, in which nobody proposes anything."""
    async with VirtualClock() as clock:
        environment = virtual_environment(clock=clock)
        engine = ReplanningEngine([ScriptedProvider()], settings=Settings(**settings), environment=environment)  # type: ignore[arg-type]
        result = await engine.execute(plan, ScriptedExecutor(script, clock=clock))
    return fired(engine, result.run)


# task-failed


async def test_failure_tells_everything() -> None:
    """A failed task gives one trigger that says which, why, how often it was tried, and in one sentence."""
    plan = made("  - {id: build, tool: make}\n  - {id: test, depends_on: [build]}")
    (trigger,) = await executed(plan, {"build": raises(OSError("disk full"))})
    assert isinstance(trigger, TaskFailed)
    assert (trigger.tasks, trigger.root, trigger.error_type, trigger.message) == (
        ("build",),
        "build",
        "OSError",
        "disk full",
    )
    assert (trigger.attempts, trigger.transient, trigger.interrupted) == (1, False, False)
    assert trigger.reason == "task 'build' with 'make' failed: OSError: disk full"


async def test_failure_waits_for_the_last_attempt() -> None:
    """Errors that may pass give no trigger while the task is run again by itself, and one afterwards."""
    plan = made("  - {id: fetch}")
    (trigger,) = await executed(plan, {"fetch": raises(TransientError("busy"))})
    assert isinstance(trigger, TaskFailed)
    assert (trigger.attempts, trigger.transient) == (3, True)
    assert trigger.reason == "task 'fetch' failed after 3 attempts: TransientError: busy"
    assert await executed(plan, {"fetch": [raises(TransientError("busy")), raises(TransientError), returns()]}) == []


async def test_interruption_is_a_failure_of_its_own_kind() -> None:
    """A worker that is cancelled gives a trigger that says so; an idempotent task is simply run again."""
    for idempotent, expected in ((False, [True]), (True, [])):
        async with watched(made(f"  - {{id: pay, idempotent: {idempotent}}}")) as (run, found):
            with anyio.CancelScope() as scope:
                async for task in run.ready():
                    async with run.attempt(task):
                        scope.cancel()
                        await anyio.lowlevel.checkpoint()
            assert [trigger.interrupted for trigger in found()] == expected


async def test_condition_that_cannot_be_evaluated() -> None:
    """A condition that names a value that does not exist fails its task, and the trigger says what is missing."""
    (trigger,) = await executed(made("  - {id: post, when: context.announce}"), {})
    assert isinstance(trigger, TaskFailed)
    assert trigger.error_type == "ConditionError"
    assert trigger.reason.startswith("the condition of task 'post' cannot be evaluated: ")
    assert "announce" in trigger.reason


async def test_arguments_that_do_not_exist() -> None:
    """A reference that finds nothing gives a trigger, though the task has never run."""
    (trigger,) = await executed(made("  - {id: post, arguments: {to: '${context.room}'}}"), {})
    assert isinstance(trigger, TaskFailed)
    assert trigger.reason.startswith("task 'post' cannot be given its arguments: ${context.room}")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("{tool: a}", "{tool: a}", True),
        ("{tool: tool-1}", "{tool: tool-2}", False),
        ("{tool: a, arguments: {n: 1}}", "{tool: a, arguments: {n: 2}}", False),
        ("{tool: a, arguments: {n: 1}}", "{tool: a, arguments: {n: 1}}", True),
    ],
)
async def test_same_call_same_cause(one: str, other: str, same: bool) -> None:
    """The same call failing in the same way is the same cause, whatever numbers the error names; no other is."""
    causes = []
    for fields, pid in ((one, 17), (other, 4711)):
        plan = made(f"  - {{id: build, {fields[1:]}")
        (trigger,) = await executed(plan, {"build": raises(OSError(f"process {pid} died at 0x7f{pid}"))})
        causes.append(trigger.cause)
    assert (causes[0] == causes[1]) is same


# timeout


async def test_timeout() -> None:
    """An attempt that runs into its deadline gives `timeout`, which names the limit."""
    (trigger,) = await executed(made("  - {id: build, tool: make, timeout: 5}"), {"build": hangs()})
    assert isinstance(trigger, TaskTimedOut)
    assert (trigger.tasks, trigger.root, trigger.timeout) == (("build",), "build", 5.0)
    assert trigger.reason == "task 'build' with 'make' did not finish within 5 s"


async def test_timeout_of_an_idempotent_task_waits_for_its_retries() -> None:
    """A deadline gives no trigger while the task is run again by itself."""
    plan = made("  - {id: build, timeout: 5, idempotent: true}")
    assert await executed(plan, {"build": [hangs(), returns()]}) == []
    (trigger,) = await executed(plan, {"build": hangs()})
    assert trigger.kind == "timeout"


async def test_timeout_raised_by_the_work_is_a_failure() -> None:
    """A TimeoutError of the work itself is a failed task, not a missed deadline."""
    (trigger,) = await executed(made("  - {id: build, timeout: 5}"), {"build": raises(TimeoutError("upstream"))})
    assert (trigger.kind, trigger.error_type) == ("task-failed", "TimeoutError")


# context-changed


async def test_context_change_names_who_reads_it() -> None:
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
        assert isinstance(trigger, ContextChanged)
        assert (trigger.tasks, trigger.keys, trigger.facts) == (("after", "maybe"), ("region",), ())
        assert trigger.reason == "context.region changed, and 2 tasks depend on it: 'after', 'maybe'"


async def test_context_change_that_concerns_nobody() -> None:
    """A key that nobody reads, or only what has run, triggers nothing; neither does an equal value."""
    plan = made("  - {id: a, arguments: {in: '${context.x}'}}\n  - {id: b}", context="{x: 1, y: 1}")
    async with watched(plan) as (run, found):
        done(run, "a")
        run.change_context({"x": 2, "y": 2, "z": 2}, removed=["y"])
        run.change_context({"x": 2})
        assert found() == []


async def test_skipped_task_is_named_when_its_condition_holds() -> None:
    """A task that its condition skipped is named once the condition holds, and not before."""
    plan = made("  - {id: post, when: context.n > 2}\n  - {id: a}", context="{n: 0}")
    async with watched(plan) as (run, found):
        assert (await anext(run.ready())).id == "a"
        run.change_context({"n": 1})
        assert found() == []
        run.change_context({"n": 3})
        assert [trigger.tasks for trigger in found()] == [("post",)]


async def test_skipped_on_purpose_stays_skipped() -> None:
    """A task that somebody skipped is not named when its condition comes to hold."""
    plan = made("  - {id: post, when: context.announce, depends_on: [a]}\n  - {id: a}\n  - {id: b}", context="{}")
    async with watched(plan) as (run, found):
        run.apply([SkipTask(task_id="post")])
        run.change_context({"announce": True})
        assert found() == []


async def test_condition_that_still_cannot_be_told() -> None:
    """A skipped task is not named while its condition cannot be evaluated."""
    plan = made("  - {id: post, when: context.n > 2}\n  - {id: a}", context="{n: 0}")
    async with watched(plan) as (run, found):
        assert (await anext(run.ready())).id == "a"
        run.change_context({"n": "many"})
        run.change_context({}, removed=["n"])
        assert found() == []


@given(data=st.data())
def test_context_change_invariant(data: st.DataObject) -> None:
    """Exactly the tasks that read the key and still have to run are named, whichever have finished."""
    count = data.draw(st.integers(1, 8))
    reads = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    over = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    tasks = [f"  - {{id: t{i}, arguments: {{v: '{'${context.x}' if reads[i] else 0}'}}}}" for i in range(count)]

    async def main() -> None:
        async with watched(made("\n".join(["  - {id: last}", *tasks]), context="{x: 1}")) as (run, found):
            done(run, *(f"t{i}" for i in range(count) if over[i]))
            run.change_context({"x": 2})
            expected = tuple(f"t{i}" for i in range(count) if reads[i] and not over[i])
            assert [trigger.tasks for trigger in found()] == ([expected] if expected else [])

    anyio.run(main)


FACTS = """[
  {name: pick, parameters: {x: string}, requires: ["clear({x})", handempty], adds: ["holding({x})"], removes: [handempty]},
  {name: put, parameters: {x: string}, requires: ["holding({x})"], adds: [handempty, "clear({x})"], removes: ["holding({x})"]},
  {name: print, needs: [paper], produces: [report]}]"""


async def test_fact_that_ceases_and_is_needed() -> None:
    """A fact that ceases triggers for the task that needs it and has nothing before it that adds it."""
    tasks = "  - {id: a, tool: pick, arguments: {x: a}}\n  - {id: b, tool: put, arguments: {x: a}, depends_on: [a]}"
    async with watched(made(tasks, tools=FACTS, facts="[clear(a), clear(b), handempty]")) as (run, found):
        run.observe(ceased=["clear(b)"])
        assert found() == []
        run.observe(ceased=["clear(a)"])
        (trigger,) = found()
        assert isinstance(trigger, ContextChanged)
        assert (trigger.tasks, trigger.facts, trigger.keys) == (("a",), ("clear(a)",), ())
        assert trigger.reason == "clear(a) does not hold any more, and 1 task depends on it: 'a'"


async def test_fact_that_comes_back_by_itself() -> None:
    """A fact that a task on the way adds again triggers nothing, however far before the one that needs it."""
    tasks = """
  - {id: up, tool: pick, arguments: {x: a}}
  - {id: down, tool: put, arguments: {x: a}, depends_on: [up]}
  - {id: rest, depends_on: [down]}
  - {id: next, tool: pick, arguments: {x: b}, depends_on: [rest]}
"""
    async with watched(made(tasks, tools=FACTS, facts="[clear(a), clear(b), handempty]")) as (run, found):
        run.succeeded(run.started("up"))
        run.observe(holds=["handempty"])
        run.observe(ceased=["handempty"])
        assert found() == []
        run.observe(ceased=["holding(a)"])
        assert [trigger.tasks for trigger in found()] == [("down",)]


async def test_fact_of_the_goal_that_is_lost() -> None:
    """A fact that the goal needs triggers when nothing that is left makes it hold again."""
    text = "goal: {objective: t, facts: [artifact(report)]}\nfacts: [artifact(paper)]\n" + f"tools: {FACTS}\n"
    plan = Plan.parse(text + "tasks:\n  - {id: print, tool: print}\n  - {id: send, depends_on: [print]}")
    async with watched(plan) as (run, found):
        run.observe(holds=["artifact(report)"])
        run.observe(ceased=["artifact(report)"])
        assert found() == []
        done(run, "print")
        run.observe(ceased=["artifact(report)"])
        (trigger,) = found()
        assert (trigger.tasks, trigger.facts) == ((), ("artifact(report)",))
        assert trigger.reason == "artifact(report) does not hold any more, and the goal needs it"


async def test_fact_that_a_replacement_brings_back() -> None:
    """The replacement of a task counts as that task: the fact that it adds is not missed."""
    tasks = """
  - {id: up, tool: pick, arguments: {x: a}}
  - {id: down, tool: put, arguments: {x: a}, depends_on: [up]}
  - {id: next, tool: pick, arguments: {x: b}, depends_on: [down]}
"""
    async with watched(made(tasks, tools=FACTS, facts="[clear(a), clear(b), handempty]")) as (run, found):
        done(run, "up")
        run.observe(holds=["handempty"])
        run.replace_task("down", Task(id="lower", tool="put", arguments={"x": "a"}))
        run.observe(ceased=["handempty"])
        assert found() == []
        run.replace_task("lower", Task(id="throw"))
        run.observe(holds=["handempty"])
        run.observe(ceased=["handempty"])
        assert [trigger.tasks for trigger in found()] == [("throw", "next")]


async def test_fact_that_nobody_can_tell_to_be_needed() -> None:
    """A task whose arguments come from a result that does not exist yet is not taken to need a fact."""
    tasks = "  - {id: find}\n  - {id: a, tool: pick, arguments: {x: '${find.output}'}, depends_on: [find]}"
    async with watched(made(tasks, tools=FACTS, facts="[clear(a)]")) as (run, found):
        run.observe(ceased=["clear(a)"])
        assert found() == []


# resource-changed

TOOLS = "[{name: a, capability: c, resources: {cpu: 2}}, {name: b, capability: c}]"


async def test_tool_that_goes_down() -> None:
    """A tool that becomes unavailable triggers for the tasks that wait for it, not for those that run or have run."""
    tasks = "\n".join(f"  - {{id: t{i}, tool: {'b' if i == 3 else 'a'}}}" for i in range(4))
    async with watched(made(tasks, tools=TOOLS, resources="{cpu: 8}")) as (run, found):
        done(run, "t0")
        run.started("t1")
        run.change_resource("a", available=False)
        (trigger,) = found()
        assert isinstance(trigger, ResourceChanged)
        assert (trigger.tasks, trigger.name, trigger.available) == (("t2",), "a", False)
        assert trigger.reason == "'a' is unavailable, and 1 waiting task needs it: 't2'"


async def test_tool_that_is_down_from_the_start() -> None:
    """A tool that the plan calls unavailable triggers before anything has run."""
    tools = TOOLS.replace("name: a,", "name: a, available: false,")
    async with watched(made("  - {id: t, tool: a}", tools=tools, resources="{cpu: 8}")) as (_, found):
        assert [(trigger.kind, trigger.tasks) for trigger in found()] == [("resource-changed", ("t",))]


async def test_resource_that_shrinks() -> None:
    """A capacity triggers once it is below what a waiting task takes; growth and enough of it do not."""
    plan = made("  - {id: t, tool: a}\n  - {id: u, tool: b}", tools=TOOLS, resources="{cpu: 8}")
    async with watched(plan) as (run, found):
        run.change_resource("cpu", capacity=16)
        run.change_resource("cpu", capacity=2)
        run.change_resource("a", available=True)
        assert found() == []
        run.change_resource("cpu", capacity=1)
        (trigger,) = found()
        assert (trigger.tasks, trigger.capacity) == (("t",), 1.0)
        assert trigger.reason == "'cpu' is down to 1, and 1 waiting task needs it: 't'"


@given(data=st.data())
def test_resource_change_invariant(data: st.DataObject) -> None:
    """Exactly the waiting users of a lost tool are named, whichever have finished, also after a retry."""
    count = data.draw(st.integers(1, 8))
    ends = data.draw(st.lists(st.sampled_from(["waits", "done", "running", "revived"]), min_size=count, max_size=count))
    tasks = "\n".join(["  - {id: last}", *(f"  - {{id: t{i}, tool: a}}" for i in range(count))])

    async def main() -> None:
        async with watched(made(tasks, tools="[{name: a}]")) as (run, found):
            for i, end in enumerate(ends):
                if end == "revived":
                    run.apply([SkipTask(task_id=f"t{i}")])
                    run.apply([RetryTask(task_id=f"t{i}")])
                elif end != "waits":
                    attempt = run.started(f"t{i}")
                    if end == "done":
                        run.succeeded(attempt)
            run.change_resource("a", available=False)
            waiting = {f"t{i}" for i, end in enumerate(ends) if end in ("waits", "revived")}
            assert [set(trigger.tasks) for trigger in found()] == ([waiting] if waiting else [])

    anyio.run(main)


# better-path-found

PRICED = """[{name: dear, capability: c, cost: 10}, {name: cheap, capability: c, cost: 4, available: false},
  {name: rest, cost: %s}, {name: picky, capability: c, cost: 1, parameters: {colour: string}}]"""


async def cheaper(rest: float, **better_path: object) -> list[Trigger]:
    """The triggers after three successes, while the cheap tool is there and two dear tasks and one other wait."""
    tasks = "\n".join(f"  - {{id: t{i}, tool: dear}}" for i in range(5)) + "\n  - {id: rest, tool: rest}"
    async with watched(made(tasks, tools=PRICED % rest), better_path=better_path) as (run, found):
        done(run, "t0", "t1")
        run.change_resource("cheap", available=True)
        run.change_resource("picky", available=False)
        done(run, "t2")
        return found()


async def test_better_path() -> None:
    """A cheaper tool of equal capability triggers for the tasks that wait, and says what share it saves."""
    (trigger,) = await cheaper(4.0)
    assert isinstance(trigger, BetterPathFound)
    assert (trigger.tasks, trigger.tool, trigger.gain) == (("t3", "t4"), "cheap", 0.5)
    assert (
        trigger.reason == "'cheap' can take over 2 waiting tasks from 'dear' and makes the remaining plan 50% cheaper"
    )


async def test_better_path_needs_the_minimum_gain() -> None:
    """A saving below the minimum gain triggers nothing."""
    assert await cheaper(100.0) == []
    assert len(await cheaper(100.0, min_gain=0.05)) == 1


async def test_better_path_is_looked_for_now_and_then() -> None:
    """It is looked for after every so many successes, not in between."""
    assert await cheaper(4.0, every=4) == []


async def test_better_path_has_its_own_time() -> None:
    """Alternatives for a better path are waited for no longer than its cap, while all others have a replan's time."""
    tools = "[{name: dear, capability: c, cost: 10}, {name: cheap, capability: c, cost: 4}]"
    plan = made("\n".join(f"  - {{id: t{i}, tool: dear}}" for i in range(5)), tools=tools, sequential="true")
    patience: dict[str, float] = {}

    def propose(request: ReplanRequest) -> list[Alternative]:
        patience[request.triggers[0].kind] = request.deadline - clock.now()
        return []

    async with VirtualClock() as clock:
        settings = Settings.model_validate({"triggers": ALL, "better_path": {"time_cap": 2}})
        environment = virtual_environment(clock=clock)
        engine = ReplanningEngine([ScriptedProvider(propose)], settings=settings, environment=environment)
        await engine.execute(plan, ScriptedExecutor({}, clock=clock))
        await engine.execute(plan, ScriptedExecutor({"t0": raises(ValueError)}, clock=clock))
    assert (patience["better-path-found"], patience["task-failed"]) == (2, settings.timeout.replan)


async def test_better_path_must_fit() -> None:
    """A cheaper tool that needs arguments which the tasks do not have is no path."""
    tools = (
        "[{name: dear, capability: c, cost: 10}, {name: picky, capability: c, cost: 1, parameters: {colour: string}}]"
    )
    tasks = "\n".join(f"  - {{id: t{i}, tool: dear}}" for i in range(5))
    async with watched(made(tasks, tools=tools)) as (run, found):
        done(run, "t0", "t1", "t2")
        assert found() == []


# human-request and goal-unreachable


async def test_person_asks() -> None:
    """A request names who asks, why, and the tasks they mean, if any; nothing has to have failed."""
    async with watched(made("  - {id: a}")) as (run, found):
        run.request_replan("use the mirror", by="ada", tasks=["a"])
        run.request_replan("look again")
        one, two = found()
        assert isinstance(one, HumanRequest)
        assert (one.tasks, one.by, one.reason) == (("a",), "ada", "ada asked for replanning: use the mirror")
        assert (two.tasks, two.by, two.reason) == ((), "", "a person asked for replanning: look again")


async def test_a_person_asks_the_same_of_several_tasks() -> None:
    """A request in the same words about another task is another request, and not put off as a repetition."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([ScriptedProvider()], environment=virtual_environment(clock=clock))
        async with engine.open(made("  - {id: a}\n  - {id: b}\n  - {id: c}")) as run:
            for task_id in ("a", "b", "c", "c"):
                run.request_replan("use the mirror", by="ada", tasks=[task_id])
                await clock.sleep(1)
            run.pause()
    decided = [body.triggers for body in bodies(engine.store, run.id) if isinstance(body, DecisionMade)]
    assert decided == [("t1",), ("t2",), ("t3",)]


async def unreachable(plan: Plan, script: Script) -> GoalUnreachable:
    """The one trigger for the end of a run whose goal cannot be reached."""
    async with VirtualClock() as clock:
        engine = ReplanningEngine([ScriptedProvider()], environment=virtual_environment(clock=clock))
        result = await engine.execute(plan, ScriptedExecutor(script, clock=clock))
    assert result.status == "failed"
    found = [body.trigger for body in bodies(engine.store, result.run) if isinstance(body, TriggerFired)]
    (trigger,) = [trigger for trigger in found if isinstance(trigger, GoalUnreachable)]
    return trigger


async def test_goal_unreachable() -> None:
    """A run that stands still with work left gives one trigger that names what holds it up."""
    plan = made("  - {id: a}\n  - {id: b, depends_on: [a]}\n  - {id: c}")
    trigger = await unreachable(plan, {"a": raises(OSError("disk full"))})
    assert (trigger.tasks, trigger.missing_facts) == (("a",), ())
    assert trigger.reason == "nothing can run any more: 2 required tasks cannot be done ('a' is FAILED)"


async def test_goal_unreachable_for_want_of_a_tool() -> None:
    """Tasks that wait for a missing tool are named, also if only an optional one does."""
    tasks = "  - {id: a, tool: t, optional: true}\n  - {id: b, depends_on: [a]}"
    trigger = await unreachable(made(tasks, tools="[{name: t, available: false}]"), {})
    assert (trigger.tasks, trigger.reason) == (
        ("a",),
        "nothing can run any more: 1 required task cannot be done ('a' is READY)",
    )


async def test_goal_unreachable_for_want_of_facts() -> None:
    """A plan that has run and whose goal does not hold is not a success; the trigger names the facts."""
    plan = Plan.parse("goal: {objective: t, facts: [artifact(report)]}\ntasks: [{id: a}]")
    trigger = await unreachable(plan, {})
    assert (trigger.tasks, trigger.missing_facts) == ((), ("artifact(report)",))
    assert trigger.reason == "nothing can run any more: the goal lacks artifact(report)"


async def test_goal_unreachable_cause_is_what_holds_it_up() -> None:
    """The same tasks stuck in the same way are the same cause, whatever numbers the error names; others are not."""
    plan = made("  - {id: a}\n  - {id: b}")
    one = await unreachable(plan, {"a": raises(OSError("process 17"))})
    same = await unreachable(plan, {"a": raises(OSError("process 23"))})
    other = await unreachable(plan, {"b": raises(OSError("process 17"))})
    assert one.cause == same.cause != other.cause


# which detectors there are


def test_detectors_are_plugins() -> None:
    """Our seven detectors are found as anyone's are, each under the kind of its triggers."""
    found = {point.name: point.load().name for point in entry_points(group="replanning.triggers")}
    assert {name: found[name] for name in ALL} == {name: name for name in ALL}


async def test_detectors_pass_over_what_they_do_not_observe() -> None:
    """A detector that is shown an observation of another kind finds nothing in it."""
    async with open_run(made("  - {id: a}")) as run:
        for point in entry_points(group="replanning.triggers"):
            assert list(point.load()().detect(UsageCharged(Usage()), run.view)) == []


async def test_better_path_is_off_by_default() -> None:
    """All kinds are enabled unless the settings say otherwise, except `better-path-found`."""
    assert set(Settings().triggers) == set(ALL) - {"better-path-found"}


@pytest.mark.parametrize("kind", ["task-failed", "timeout", "human-request", "context-changed", "resource-changed"])
async def test_each_kind_can_be_disabled(kind: str) -> None:
    """A kind that the settings leave out gives no trigger, and the others still do."""
    tasks = """
  - {id: fails}
  - {id: hangs, timeout: 5}
  - {id: reads, arguments: {v: "${context.x}"}, depends_on: [hangs]}
  - {id: uses, tool: t, depends_on: [hangs]}
"""
    plan = made(tasks, context="{x: 1}", tools="[{name: t}]")
    async with VirtualClock() as clock:
        settings = Settings.model_validate({"triggers": [name for name in ALL if name != kind]})
        engine = ReplanningEngine([], settings=settings, environment=virtual_environment(clock=clock))
        async with engine.open(plan) as run:
            run.failed(run.started("fails"), OSError("no"))
            run.started("hangs")
            run.request_replan("please")
            run.change_context({"x": 2})
            run.change_resource("t", available=False)
            await clock.sleep(6)
            run.pause()
    expected = {"task-failed", "timeout", "human-request", "context-changed", "resource-changed"} - {kind}
    assert {trigger.kind for trigger in fired(engine, run.id)} == expected


def test_cause_in_short() -> None:
    """A cause is one short text of its parts, without the numbers and addresses that vary by occasion."""
    assert normalised_cause("OSError", "", None, "port 8080 at 0x7f3a, run deadbeef42") == "OSError:port # at #, run #"
    assert len(normalised_cause("x" * 500)) == 200
