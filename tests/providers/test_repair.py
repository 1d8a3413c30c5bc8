"""The repair provider: what it proposes, in what order, and that plans run on with it."""

from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import (
    Alternative,
    Answer,
    Plan,
    PlanRun,
    ReplanningEngine,
    ReplanRequest,
    Retry,
    RunResult,
    Settings,
    TransientError,
    open_run,
)
from replanning.changes import CancelTask, ReplaceTask, SkipTask
from replanning.journal import (
    AlternativesConsidered,
    BetterPathFound,
    Candidate,
    ContextChanged,
    GoalUnreachable,
    HumanRequest,
    ResourceChanged,
    RunStore,
    TaskFailed,
    TaskTimedOut,
    Trigger,
)
from replanning.providers.repair import RepairProvider
from replanning.testing import (
    ScriptedExecutor,
    ScriptedGate,
    ScriptStep,
    VirtualClock,
    hangs,
    raises,
    returns,
    virtual_environment,
)
from tests.support.runs import bodies

Script = dict[str, ScriptStep | list[ScriptStep]]
BROKEN = raises(OSError("disk full"))
BUSY = raises(TransientError("busy"))
PAIR = "  - {name: a, capability: c}\n  - {name: b, capability: c}"
ONE_TRY = Settings(retry=Retry(max_attempts=1))


def made(tasks: str, tools: str = "", **fields: object) -> Plan:
    """A plan of tasks and tools written as in a plan file."""
    text = "".join(
        f"{name}: {value}\n" for name, value in {"goal": "{objective: test}", **fields}.items()
    )
    return Plan.parse(
        f"{text}tools:\n{tools}\ntasks:\n{tasks}" if tools else f"{text}tasks:\n{tasks}"
    )


async def executed(
    plan: Plan, script: Script, **parts: object
) -> tuple[RunResult, RunStore, ScriptedExecutor, VirtualClock]:
    """Run a plan with nothing but the repair provider, by four workers."""
    async with VirtualClock() as clock:
        work = ScriptedExecutor(script, clock=clock)
        engine = ReplanningEngine(environment=virtual_environment(clock=clock), **parts)  # type: ignore[arg-type]
        result = await engine.execute(plan, work, max_concurrency=4)
    return result, engine.store, work, clock


def reasons(result: RunResult) -> list[str]:
    """Why the plan was changed, each time."""
    return [revised.reason for revised in result.revisions]


def rejected(store: RunStore, run: str) -> list[Candidate]:
    """The alternatives that were no way on, with why."""
    considered = [body for body in bodies(store, run) if isinstance(body, AlternativesConsidered)]
    return [candidate for body in considered for candidate in body.candidates if candidate.rejected]


async def proposed(run: PlanRun, *triggers: Trigger, wanted: int = 3) -> Sequence[Alternative]:
    """Alternatives of the provider for the current state of a run."""
    request = ReplanRequest(triggers=triggers, view=run.view, max_alternatives=wanted, deadline=0.0)
    return await RepairProvider().propose(request)


def broken(run: PlanRun, *tasks: str, error: BaseException | str = "disk full") -> TaskFailed:
    """Let tasks fail, and the trigger that follows."""
    for task in tasks:
        run.failed(run.started(task), error)
    return TaskFailed(tasks=tasks, root=tasks[0])


async def offered(plan: Plan, *failed: str) -> Sequence[Alternative]:
    """Alternatives once these tasks of a plan have failed."""
    async with open_run(plan) as run:
        return await proposed(run, broken(run, *failed))


def replacements(alternatives: Sequence[Alternative]) -> list[str | None]:
    """The tools of the tasks that replace others, one for each alternative."""
    changes = [alternative.changes[0] for alternative in alternatives if alternative.changes]
    return [change.tasks[0].tool for change in changes if isinstance(change, ReplaceTask)]


# Declared fallbacks


async def test_fallback_is_taken_as_declared():
    """A fallback brings its own arguments, timeout, retries and resources; of the task that failed, what is accepted."""
    fallback = "{name: mirror, tool: t, arguments: {u: m}, timeout: 9, retry: {max_attempts: 2}, resources: {net: 1}}"
    tasks = f"  - {{id: get, timeout: 5, priority: 3, arguments: {{u: x}}, acceptance: [ok], fallbacks: [{fallback}]}}"
    (alternative,) = await offered(made(tasks, resources="{net: 2}"), "get")
    (task,) = alternative.changes[0].tasks
    assert task.model_dump(exclude_defaults=True) == {
        "id": "get~2",
        "name": "mirror",
        "tool": "t",
        "arguments": {"u": "m"},
        "timeout": 9.0,
        "retry": {"max_attempts": 2},
        "resources": {"net": 1.0},
        "acceptance": ("ok",),
    }
    assert (alternative.confidence, alternative.reason) == (
        0.9,
        "replace 'get' by its declared fallback 'mirror'",
    )


async def test_fallbacks_in_their_order():
    """The first fallback is proposed first, each with those that it leaves; all are held to what their task is, or more."""
    fallbacks = (
        "[{tool: t1, fallbacks: [{tool: t4}]}, {tool: t2, acceptance: [a file]}, {tool: t3}]"
    )
    found = await offered(
        made(f"  - {{id: a, tool: t0, acceptance: [a page], fallbacks: {fallbacks}}}"), "a"
    )
    ways = [alternative.changes[0].tasks[0] for alternative in found]
    assert [(task.tool, *task.acceptance) for task in ways] == [
        ("t1", "a page"),
        ("t2", "a file"),
        ("t3", "a page"),
    ]
    left = [[(other.tool, *other.acceptance) for other in task.fallbacks] for task in ways]
    assert left == [
        [("t4",), ("t2", "a file"), ("t3", "a page")],
        [("t1", "a page"), ("t3", "a page")],
        [("t1", "a page"), ("t2", "a file")],
    ]


async def test_ids_are_not_shared_between_alternatives():
    """Every alternative of a request gives its tasks ids of their own, so that applying one never hinders another."""
    tasks = "\n".join(
        f"  - {{id: a{i}, tool: t, fallbacks: [{{tool: u}}, {{tool: v}}]}}" for i in range(3)
    )
    alternatives = await offered(made(tasks), "a0", "a1", "a2")
    ids = [new.id for a in alternatives[:2] for change in a.changes for new in change.tasks]
    assert len(ids) == len(set(ids)) == 6


async def test_fallback_whose_tool_is_down_waits_its_turn():
    """A fallback that cannot run now is passed over, and kept for later."""
    tools = "  - {name: t0}\n  - {name: t1, available: false}\n  - {name: t2}"
    (alternative,) = await offered(
        made("  - {id: a, tool: t0, fallbacks: [{tool: t1}, {tool: t2}]}", tools), "a"
    )
    assert replacements([alternative]) == ["t2"]
    assert [fallback.tool for fallback in alternative.changes[0].tasks[0].fallbacks] == ["t1"]


# Tools of equal capability

EQUAL = """  - {name: a, capability: c}
  - {name: dear, capability: c, cost: 9}
  - {name: cheap, capability: c, cost: 1}
  - {name: unpriced, capability: c}
  - {name: other, capability: d}"""


async def test_equal_tools_cheapest_first():
    """Tools of equal capability do the same task under the same limits, the cheapest first, unknown cost last."""
    task = "  - {id: get, tool: a, arguments: {u: x}, timeout: 5, metadata: {k: 1}}"
    alternatives = await offered(made(task, EQUAL), "get")
    assert replacements(alternatives) == ["cheap", "dear", "unpriced"]
    assert [(a.confidence, a.expected_cost) for a in alternatives] == [
        (0.8, 1.0),
        (0.8, 9.0),
        (0.8, None),
    ]
    new = alternatives[0].changes[0].tasks[0]
    assert (new.id, new.arguments, new.timeout, new.metadata) == (
        "get~2",
        {"u": "x"},
        5.0,
        {"k": 1},
    )


@pytest.mark.parametrize(
    ("fields", "tools", "why"),
    [
        (
            ", fallbacks: [{tool: cheap}, {tool: dear}]",
            "",
            "its fallbacks have all been tried, no other tool is known to do the same",
        ),
        (
            "",
            "\n".join(EQUAL.splitlines()[:3]),
            "it declares no fallback, 'cheap' has failed as well, 'a' has failed as well",
        ),
    ],
    ids=["fallbacks", "equal tools"],
)
async def test_each_way_is_tried_once(fields, tools, why):
    """Each fallback or equal tool gets one chance for a lineage; when all have failed, that is proof, and the run fails."""
    plan = made(f"  - {{id: get, tool: a{fields}}}\n  - {{id: end, depends_on: [get]}}", tools)
    result, store, work, clock = await executed(
        plan, {"a": BROKEN, "cheap": BROKEN, "dear": BROKEN}
    )
    assert (result.status, result.reason, clock.elapsed) == (
        "failed",
        "'get~3' failed (disk full)",
        0,
    )
    assert [call.task.tool for call in work.calls] == ["a", "cheap", "dear"]
    last = rejected(store, result.run)[-1]
    assert last.rejected == "proven-unreachable"
    assert last.alternative.reason == (
        f"no repair for task 'get~3', which is FAILED (OSError): {why},"
        " it is not optional, the error will not pass by itself"
    )


async def test_equal_tool_gets_the_arguments_it_takes():
    """Arguments that the other tool does not take are left out, which the reason says."""
    tools = """  - {name: a, capability: c, parameters: {url: string, verbose: boolean}}
  - {name: b, capability: c, parameters: {url: string}}"""
    (alternative,) = await offered(
        made("  - {id: get, tool: a, arguments: {url: x, verbose: true}}", tools), "get"
    )
    assert alternative.changes[0].tasks[0].arguments == {"url": "x"}
    assert alternative.reason == (
        "do 'get' with 'b', of the same capability 'c' (without 'verbose', which it does not take)"
    )


@pytest.mark.parametrize(
    ("other", "why", "proven"),
    [
        ("capability: d", "no other tool has the capability 'c'", True),
        ("capability: c, available: false", "'b' is unavailable", False),
        (
            "capability: c, parameters: {url: string, colour: string}",
            "'b' needs the arguments ['colour']",
            True,
        ),
        ("capability: c, parameters: {url: integer}", "expected integer", False),
        ("capability: c, command: 'curl {address}'", "'b' names {address} in its command", False),
        ("capability: c, resources: {cpu: 4}", "'b' takes 4 of 'cpu', and there is 1", False),
    ],
)
async def test_other_tool_that_does_not_fit(other, why, proven):
    """A tool that lacks something is not proposed; the verdict says what, and claims proof if that cannot change."""
    tools = f"  - {{name: a, capability: c}}\n  - {{name: b, {other}}}"
    async with open_run(
        made("  - {id: get, tool: a, arguments: {url: x}}", tools, resources="{cpu: 8}")
    ) as run:
        run.change_resource("cpu", capacity=1)
        (verdict,) = await proposed(run, broken(run, "get"))
    assert verdict.changes == ()
    assert verdict.unreachable == ("proven-unreachable" if proven else "not-found-within-bound")
    assert why in verdict.reason


# Skipping and trying again


async def test_replacement_of_an_optional_task_may_be_skipped():
    """The replacement of an optional task is optional, too."""
    plan = made("  - {id: post, tool: a, optional: true, fallbacks: [{tool: b}]}")
    result, _, _, _ = await executed(plan, {"a": BROKEN, "b": BROKEN})
    assert result.status == "succeeded"
    assert reasons(result) == [
        "replace 'post' by its declared fallback 'b'",
        "skip 'post~2', which is optional",
    ]


async def test_retry_where_nothing_else_helps():
    """An error that may pass is worth another try, later each time, and a person is asked about it."""
    gate = ScriptedGate([Answer("approve", by="ada")] * 2)
    result, _, _, _ = await executed(
        made("  - {id: get}"), {"get": [BUSY] * 8 + [returns(1)]}, gate=gate
    )
    assert (result.status, result.outputs) == ("succeeded", {"get": 1})
    assert [revised.changes[0].delay for revised in result.revisions] == [5.0, 10.0]
    assert reasons(result)[0] == "try 'get' again in 5 s: TransientError may pass"


@pytest.mark.parametrize(
    ("fields", "error", "tries", "verdict", "why"),
    [
        ("", OSError("disk full"), 0, "proven-unreachable", "the error will not pass by itself"),
        (
            ", retry: {max_attempts: 1}",
            BUSY.error,
            0,
            "not-found-within-bound",
            "the retries it declares are used up",
        ),
        ("", BUSY.error, 3, "not-found-within-bound", "it has failed 4 times"),
    ],
    ids=["lasting", "declared", "too often"],
)
async def test_no_retry(fields, error, tries, verdict, why):
    """No retry for an error that will not pass, a task that says how it is retried, or one that failed often enough."""
    async with open_run(
        made(f"  - {{id: get{fields}}}\n  - {{id: last}}"), settings=ONE_TRY
    ) as run:
        for _ in range(tries):
            (retry, *_) = await proposed(run, broken(run, "get", error=error))
            run.apply([change.model_copy(update={"delay": 0.0}) for change in retry.changes])
        (found,) = await proposed(run, broken(run, "get", error=error))
    assert (found.changes, found.unreachable) == ((), verdict)
    assert why in found.reason


async def test_timeout_takes_another_tool():
    """A reading task that ran into its deadline is done by another tool rather than by the same one again."""
    task = "  - {id: get, tool: a, timeout: 5, effect: none, retry: {max_attempts: 1}}"
    result, _, _, clock = await executed(made(task, PAIR), {"a": hangs()})
    assert (result.status, clock.elapsed) == ("succeeded", 5)
    assert reasons(result) == ["do 'get' with 'b', of the same capability 'c'"]


# Context and resources


@pytest.mark.parametrize(
    ("post", "context", "change", "reason"),
    [
        (
            "when: context.announce",
            "{announce: false}",
            {"announce": True},
            "run 'post', whose condition holds now",
        ),
        (
            "arguments: {to: '${context.room}'}",
            "{}",
            {"room": "ops"},
            "run 'post' again, whose arguments exist now",
        ),
    ],
    ids=["condition", "argument"],
)
async def test_unprepared_task_runs_after_all(post, context, change, reason, clock):
    """A task that its condition skipped, or that lacked a value, runs once the context has what it needs."""
    engine = ReplanningEngine(environment=virtual_environment(clock=clock))
    async with engine.open(
        made(f"  - {{id: post, {post}}}\n  - {{id: long}}", context=context)
    ) as run:
        ready = run.ready()
        assert (await anext(ready)).id == "long"
        attempt = run.started("long")
        await clock.sleep(1)
        run.change_context(change)
        assert (await anext(ready)).id == "post"
        run.succeeded(run.started("post"))
        run.succeeded(attempt)
    assert (run.result.status, reasons(run.result)) == ("succeeded", [reason])


async def test_refused_use():
    """A use that an output makes dangerous is not tried again as if its arguments had been missing; another tool is tried."""
    tools = [
        f"  - {{name: {name}, kind: shell, capability: c, command: '{name} {{x}}'}}"
        for name in ("timeout", "cat")
    ]
    tasks = (
        "  - {id: a}\n  - {id: b, tool: timeout, arguments: {x: '${a.output}'}, depends_on: [a]}"
    )
    result, *_ = await executed(made(tasks, "\n".join(tools)), {"a": returns("rm")})
    assert (result.status, reasons(result)) == (
        "succeeded",
        ["do 'b' with 'cat', of the same capability 'c'"],
    )
    result, store, _, _ = await executed(made(tasks, tools[0]), {"a": returns("rm")})
    assert (result.status, reasons(result)) == ("failed", [])
    assert not any(one.alternative.changes for one in rejected(store, result.run))


async def test_failed_reader_of_what_changed():
    """A task that failed is worth another try when what it refers to has changed, though its error would not pass."""
    tasks = "  - {id: get, arguments: {u: '${context.url}'}}\n  - {id: b}"
    async with open_run(made(tasks, context="{url: x}")) as run:
        failed = broken(run, "get")
        run.change_context({"url": "y"})
        (verdict,) = await proposed(run, failed)
        (alternative,) = await proposed(run, ContextChanged(tasks=("get",), keys=("url",)))
        assert await proposed(run, ContextChanged(tasks=("b",), keys=("url",))) == []
    assert (verdict.changes, alternative.confidence) == ((), 0.6)
    assert alternative.reason == "try 'get' again in 5 s: what it refers to has changed"


@pytest.mark.parametrize("count", [1, 4, 30])
async def test_outage_of_a_tool_that_many_tasks_need(count):
    """However many tasks wait for a tool that goes down, all get its equal, and nobody is asked."""
    ids = [f"t{i}" for i in range(count)]
    tasks = (
        "\n".join(f"  - {{id: {i}, tool: a}}" for i in ids)
        + f"\n  - {{id: end, depends_on: [{', '.join(ids)}]}}"
    )
    down = PAIR.replace("{name: a,", "{name: a, available: false,")
    result, _, work, _ = await executed(made(tasks, down), {})
    assert result.status == "succeeded"
    assert [call.task.tool for call in work.calls] == ["b"] * count + [None]


@pytest.mark.parametrize(
    ("plan", "reason", "verdict"),
    [
        (
            made("  - {id: one, tool: a}\n  - {id: two}", "  - {name: a, available: false}"),
            "nothing can run, and 'one' still must; 'one' cannot run: its tool 'a' is unavailable",
            "task 'one', which is READY: 'a' is unavailable",
        ),
        (
            made("  - {id: a}", goal="{objective: t, facts: [artifact(report)]}"),
            "",
            "the goal, which lacks artifact(report)",
        ),
    ],
    ids=["outage without an equal tool", "facts that the goal lacks"],
)
async def test_what_nothing_known_helps_against(plan, reason, verdict):
    """A tool that stays down, or a goal that is not reached, is told as it is, without a claim of proof."""
    result, store, _, _ = await executed(plan, {})
    assert result.status == "failed"
    assert result.reason.startswith(reason)
    first = rejected(store, result.run)[0]
    assert first.rejected == "not-found-within-bound"
    assert first.alternative.reason.startswith(f"no repair for {verdict}")


async def test_capacity_that_shrinks():
    """A task that takes more than is left is done by a tool that takes less."""
    tools = "  - {name: a, capability: c, resources: {cpu: 4}}\n  - {name: b, capability: c, resources: {cpu: 1}}"
    async with open_run(made("  - {id: one, tool: a}", tools, resources="{cpu: 8}")) as run:
        run.change_resource("cpu", capacity=2)
        assert replacements(await proposed(run, ResourceChanged(tasks=("one",), name="cpu"))) == [
            "b"
        ]


async def test_optional_task_is_not_skipped_for_an_outage():
    """A tool that is down for now is no reason to give an optional task up, until nothing else goes on."""
    async with open_run(
        made("  - {id: one, tool: a, optional: true}", "  - {name: a, available: false}")
    ) as run:
        (verdict,) = await proposed(run, ResourceChanged(tasks=("one",), name="a", available=False))
        (skip,) = await proposed(run, GoalUnreachable(tasks=("one",)))
    assert (verdict.changes, type(skip.changes[0])) == ((), SkipTask)


# Several tasks at once


async def test_failures_are_repaired_each_in_its_way():
    """Tasks that fail at the same time and hold up the same task are all repaired; what runs is left alone."""
    tasks = """
  - {id: equal, tool: a}
  - {id: back, tool: d, fallbacks: [{tool: e}]}
  - {id: extra, tool: d, optional: true}
  - {id: long, tool: e}
  - {id: end, arguments: {v: "${back.output}"}, depends_on: [equal, back, extra, long]}
"""
    script: Script = {"a": BROKEN, "d": BROKEN, "long": returns(1, after=60), "back~2": returns(42)}
    result, _, work, clock = await executed(
        made(tasks, f"{PAIR}\n  - {{name: d}}\n  - {{name: e}}"), script
    )
    assert (result.status, clock.elapsed, result.outputs["back"]) == ("succeeded", 60, 42)
    assert sorted(reasons(result)) == [
        "do 'equal' with 'b', of the same capability 'c'",
        "replace 'back' by its declared fallback 'e'",
        "skip 'extra', which is optional",
    ]
    assert len(work.calls_of("long")) == 1
    assert [call.task.arguments for call in work.calls_of("end")] == [{"v": 42}]


async def test_all_together_comes_before_one_alone():
    """For several stuck tasks the best of each together is proposed first, then the next best, then single ones."""
    tasks = "  - {id: a, tool: t, fallbacks: [{tool: u}, {tool: v}]}\n  - {id: b, tool: t, optional: true}"
    alternatives = await offered(made(tasks), "a", "b")
    assert [[(type(c), c.task_id) for c in a.changes] for a in alternatives] == [
        [(ReplaceTask, "a"), (SkipTask, "b")],
        [(ReplaceTask, "a"), (SkipTask, "b")],
        [(ReplaceTask, "a")],
        [(SkipTask, "b")],
    ]
    assert [a.confidence for a in alternatives] == [0.7, 0.7, 0.9, 0.7]
    assert (
        alternatives[0].reason
        == "replace 'a' by its declared fallback 'u'; skip 'b', which is optional"
    )


async def test_what_can_be_repaired_is():
    """One task without a way on does not keep another from being repaired, and both are told."""
    tasks = "  - {id: a, tool: t, fallbacks: [{tool: u}]}\n  - {id: b, tool: t}\n  - {id: end, depends_on: [a, b]}"
    result, store, work, _ = await executed(made(tasks), {"t": BROKEN})
    assert (result.status, result.reason) == ("failed", "'b' failed (disk full)")
    assert reasons(result) == ["replace 'a' by its declared fallback 'u'"]
    assert rejected(store, result.run)[0].rejected == "proven-unreachable"
    assert len(work.calls_of("a~2")) == 1


# A person, and a goal out of reach


async def test_nothing_is_proposed_where_nothing_has_failed():
    """Without a failure only a person who names a waiting task gets alternatives; a task that runs gets none at all."""
    named: tuple[str, ...] = ("get",)
    async with open_run(made("  - {id: get, tool: a, optional: true}", PAIR)) as run:
        assert await proposed(run, HumanRequest(reason="look")) == []
        assert await proposed(run, TaskTimedOut(tasks=named)) == []
        alternatives = await proposed(run, HumanRequest(tasks=named))
        run.started("get")
        triggers = (
            HumanRequest(tasks=named),
            ResourceChanged(tasks=named, name="a"),
            GoalUnreachable(tasks=named),
        )
        assert await proposed(run, *triggers) == []
    assert [type(a.changes[0]) for a in alternatives] == [ReplaceTask, SkipTask]


async def test_request_names_none():
    """A person who names no task means all that are stuck."""
    async with open_run(
        made("  - {id: a, optional: true}\n  - {id: b, optional: true}\n  - {id: c}")
    ) as run:
        broken(run, "a", "b")
        alternatives = await proposed(run, HumanRequest(), wanted=1)
    assert [[change.task_id for change in a.changes] for a in alternatives] == [["a", "b"], ["a"]]


async def test_request_lifts_the_limit():
    """A task that was given up at the limit gets another chance when a person asks for it, and only then."""
    engine = ReplanningEngine(
        settings=Settings.model_validate({"limits": {"replans_per_lineage": 0}})
    )
    async with engine.open(
        made("  - {id: a, tool: t, fallbacks: [{tool: u}]}\n  - {id: b}")
    ) as run:
        broken(run, "a")
        await anyio.wait_all_tasks_blocked()
        (given_up,) = run.view.stuck()
        (verdict,) = await proposed(run, GoalUnreachable(tasks=("a",)))
        (alternative,) = await proposed(run, HumanRequest(tasks=("a",)))
        run.pause()
    assert (given_up.state, verdict.changes, replacements([alternative])) == ("BLOCKED", (), ["u"])


async def test_cancelled_task_is_named():
    """A required task that somebody cancelled is not revived behind their back; the verdict names it."""
    async with open_run(made("  - {id: a}\n  - {id: b, depends_on: [a]}\n  - {id: c}")) as run:
        run.apply([CancelTask(task_id="a", reason="not today")])
        (verdict,) = await proposed(run, GoalUnreachable(tasks=("a",)))
    assert (verdict.changes, verdict.unreachable) == ((), "not-found-within-bound")
    assert (
        verdict.reason == "no repair for task 'a', which is CANCELLED: it was cancelled: not today"
    )


@pytest.mark.parametrize(
    ("fields", "word"), [({}, "proven-unreachable"), ({"facts": "[x]"}, "not-found-within-bound")]
)
async def test_stated_facts_leave_the_question_open(fields, word):
    """With stated facts, other tools might still achieve the needed facts: that is no proof."""
    (verdict,) = await offered(made("  - {id: a, tool: t}", "  - {name: t}", **fields), "a")
    assert verdict.unreachable == word


async def test_never_silence():
    """A request for tasks that have no way on is answered with a reason for every means."""
    ids = [f"t{i}" for i in range(8)]
    (verdict,) = await offered(made("\n".join(f"  - {{id: {i}}}" for i in ids)), *ids)
    assert (verdict.unreachable, verdict.reason.count("it declares no fallback")) == (
        "proven-unreachable",
        5,
    )
    assert verdict.reason.endswith("; and 3 more")


# A better path

PRICED = "  - {name: dear, capability: c, cost: 10}\n  - {name: cheap, capability: c, cost: 1, available: false}"


async def test_better_path():
    """A cheaper tool that comes up takes over what waits; what has run and what runs stays."""
    tasks = "\n".join(f"  - {{id: t{i}, tool: dear}}" for i in range(6))
    engine = ReplanningEngine(settings=Settings(triggers=("better-path-found",)))
    async with engine.open(made(tasks, PRICED)) as run:
        attempts = [run.started(f"t{i}") for i in range(4)]
        run.change_resource("cheap", available=True)
        for attempt in attempts[:3]:
            run.succeeded(attempt)
        await anyio.wait_all_tasks_blocked()
        tools = {task.id: task.tool for task in run.plan.tasks}
        run.pause()
        run.succeeded(attempts[3])
    assert tools == {
        "t0": "dear",
        "t1": "dear",
        "t2": "dear",
        "t3": "dear",
        "t4~2": "cheap",
        "t5~2": "cheap",
    }
    assert len(run.result.revisions) == 1


async def test_repairs_come_before_better_paths():
    """A request that is about a failed task as well is about repair alone."""
    tools = PRICED.replace(", available: false", "")
    async with open_run(
        made("  - {id: a, tool: dear}\n  - {id: b, tool: dear, optional: true}", tools)
    ) as run:
        better = BetterPathFound(tasks=("a",), tool="cheap", gain=0.9)
        assert [[c.task_id for c in a.changes] for a in await proposed(run, better)] == [["a"]]
        assert await proposed(run, BetterPathFound(tasks=("a",), tool="gone")) == []
        run.change_resource("cheap", available=False)
        assert await proposed(run, better) == []
        alternatives = await proposed(run, broken(run, "b"), better)
    assert {change.task_id for a in alternatives for change in a.changes} == {"b"}


# Whatever the plan


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, set[str]]:
    """A plan in which some tools always fail, and every task that uses one has another way."""
    count = draw(st.integers(1, 12))
    lines, failing = [], set()
    for i in range(count):
        deps = [f"t{j}" for j in range(i) if draw(st.integers(0, 3)) == 0]
        kind = draw(st.sampled_from(["sound", "fallback", "equal", "optional"]))
        extra = {
            "fallback": "tool: bad, fallbacks: [{tool: worse}, {tool: good}]",
            "equal": "tool: one",
        }
        fields = extra.get(
            kind, "tool: bad, optional: true" if kind == "optional" else "tool: good"
        )
        lines.append(f"  - {{id: t{i}, {fields}, depends_on: [{', '.join(deps)}]}}")
        failing |= {f"t{i}"} if kind != "sound" else set()
    tools = "\n".join(f"  - {{name: {name}}}" for name in ("good", "bad", "worse"))
    return made(
        "\n".join(lines),
        f"{tools}\n  - {{name: one, capability: c}}\n  - {{name: two, capability: c}}",
    ), failing


@given(case=plans())
def test_every_plan_with_a_way_on_finishes(case):
    """Plans in which every failing task has another way finish; no call is repeated; sound tasks stay as they are.

    An optional task whose tool has failed too often need not be tried.
    """
    plan, failing = case
    script: Script = {"bad": BROKEN, "worse": BROKEN, "one": BROKEN}

    async def main() -> None:
        result, store, work, _ = await executed(plan, script)
        assert result.status == "succeeded"
        touched = {
            change.task_id.partition("~")[0]
            for revised in result.revisions
            for change in revised.changes
        }
        assert touched <= failing
        assert all(task.optional for task in plan.tasks if task.id in failing - touched)
        assert len(work.calls) == len({call.task.id for call in work.calls})
        assert all(
            candidate.score or candidate.alternative.unreachable
            for candidate in rejected(store, result.run)
        )

    anyio.run(main)
