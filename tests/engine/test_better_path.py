"""Better paths: what has begun is left out, slow providers and other replans do not cost them, and none costs more."""

import pytest

from replanning import (
    Plan,
    PlanEvaluator,
    ReplanningEngine,
    RunResult,
    Settings,
    Task,
)
from replanning.changes import AddTask, ModifyTask, PlanChange, RemoveTask, ReplaceTask
from replanning.decision import AlternativeProvider
from replanning.journal import AlternativesConsidered, TriggerDropped
from replanning.testing import (
    ScriptedExecutor,
    ScriptedProvider,
    ScriptStep,
    VirtualClock,
    hangs,
    raises,
    returns,
)
from tests.support.runs import alternative, bodies, environment, perform, plan

TOOLS = [
    {"name": "dear", "capability": "c", "cost": 10},
    {"name": "cheap", "capability": "c", "cost": 4},
    {"name": "new", "capability": "c", "cost": 9},
]


def dear(count: int = 8, **fields: object) -> Plan:
    """A plan of tasks, one after another, that a cheaper tool could do."""
    tasks = [Task(id=f"t{number}", tool="dear") for number in range(count)]
    return plan(*tasks, tools=TOOLS, sequential=True, **fields)


def replaced(*task_ids: str, tool: str = "cheap") -> list[PlanChange]:
    """The replacement of tasks by others with another tool."""
    return [ReplaceTask(task_id=i, tasks=(Task(id=f"{i}~2", tool=tool),)) for i in task_ids]


async def carried_out(
    document: Plan,
    *providers: AlternativeProvider | str,
    clock: VirtualClock,
    script: dict[str, ScriptStep] | None = None,
    evaluator: PlanEvaluator | None = None,
    **settings: object,
) -> tuple[RunResult, dict[str, str], list[str], ReplanningEngine]:
    """Carry out a plan, one second for each task: the result, the tool of each task that was done, what was rejected."""
    triggers = {"triggers": ("better-path-found", "task-failed")}
    used = Settings.model_validate({**triggers, **settings})
    engine = ReplanningEngine(
        providers, settings=used, environment=environment(clock), evaluator=evaluator
    )
    work = ScriptedExecutor(script or {}, clock=clock, default=returns(after=1))
    result = await engine.execute(document, work)
    tools = {call.task.id: call.task.tool or "" for call in work.calls}
    considered = bodies(engine.store, result.run, AlternativesConsidered)
    rejected = [c.rejected for body in considered for c in body.candidates if c.rejected]
    return result, tools, rejected, engine


def proposer(clock: VirtualClock, *changes: PlanChange, after: float) -> ScriptedProvider:
    """A provider that proposes changes, some time after the first request."""
    return ScriptedProvider([returns(alternative(*changes), after=after)], clock=clock)


async def test_tasks_that_have_begun_are_left_out(clock):
    """What has begun while the proposal was awaited stays as it is, and the rest of the better path is taken."""
    waiting = [f"t{number}" for number in range(3, 8)]
    result, tools, _, engine = await carried_out(
        dear(), proposer(clock, *replaced(*waiting), after=1.5), clock=clock
    )
    assert result.ok
    assert list(tools.items())[3:] == [
        ("t3", "dear"),
        ("t4", "dear"),
        *((f"t{n}~2", "cheap") for n in (5, 6, 7)),
    ]
    (considered,) = bodies(engine.store, result.run, AlternativesConsidered)[:1]
    assert (
        considered.candidates[0].alternative.reason == "scripted (without what has begun meanwhile)"
    )


async def test_skipped_tasks_are_left_out(clock):
    """A task whose condition has turned out not to hold costs the rest of the path nothing."""
    tasks = [Task(id=f"t{n}", tool="dear", when="context.on" if n == 3 else None) for n in range(6)]
    document = plan(*tasks, tools=TOOLS, sequential=True, context={"on": False})
    provider = proposer(clock, *replaced("t3", "t4", "t5"), after=0.5)
    _, tools, _, _ = await carried_out(document, provider, clock=clock)
    assert tools == {"t0": "dear", "t1": "dear", "t2": "dear", "t4": "dear", "t5~2": "cheap"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (replaced("t3", "t4", "t5"), "it saves 15% of the remaining cost, which is too little"),
        (
            replaced("t0", "t7"),
            "it does not fit the plan: changes[0]: task 't0' is DONE: it cannot be replaced",
        ),
        (
            replaced("t3"),
            "it does not fit the plan: changes[0]: task 't3' is DONE: it cannot be replaced",
        ),
    ],
)
async def test_what_remains_must_still_gain_enough(changes, reason, clock):
    """The path is not taken where what remains of it saves less than the minimum, or nothing remains of it."""
    provider = proposer(clock, *changes, after=1.5)
    result, tools, rejected, _ = await carried_out(
        dear(), provider, clock=clock, better_path={"min_gain": 0.2}
    )
    assert (set(tools.values()), result.revisions, rejected) == ({"dear"}, (), [reason])


async def test_changes_that_belong_together_are_not_separated(clock):
    """A proposal that adds or removes tasks is one idea: without a part of it, the rest is not taken."""
    changes = [*replaced("t3"), RemoveTask(task_id="t7"), AddTask(task=Task(id="x", tool="cheap"))]
    result, _, (rejected,), _ = await carried_out(
        dear(), proposer(clock, *changes, after=0.5), clock=clock
    )
    assert (result.revisions, "'t3' is RUNNING" in rejected) == ((), True)


async def test_a_dearer_path_is_not_taken(clock):
    """Whoever proposes it: a path must save the minimum of what is left; the one that saves most comes first."""
    little, much = (
        alternative(*replaced("t4", tool="new"), confidence=1),
        alternative(*replaced("t5", "t6", "t7")),
    )
    dearer = alternative(AddTask(task=Task(id="x", tool="cheap")), confidence=1)
    some = alternative(*replaced("t6", "t7"), confidence=1)
    provider = ScriptedProvider([[little, dearer, some, much]])
    _, tools, rejected, _ = await carried_out(dear(), provider, clock=clock)
    assert [tools[i] for i in ("t3", "t4", "t5~2", "t6~2", "t7~2")] == [
        "dear",
        "dear",
        "cheap",
        "cheap",
        "cheap",
    ]
    assert rejected == [
        f"it saves {share} of the remaining cost, which is too little" for share in ("2%", "-8%")
    ]


@pytest.mark.parametrize("names", [("repair", "slow"), ("slow", "repair")])
async def test_slow_providers_are_not_awaited(names, clock):
    """What the plan itself offers is taken at once; another provider is not even asked."""
    slow = ScriptedProvider([hangs()] * 9, name="slow", clock=clock)
    result, tools, _, _ = await carried_out(
        dear(), *(slow if n == "slow" else n for n in names), clock=clock
    )
    assert (result.ok, list(tools.values())) == (True, ["dear"] * 4 + ["cheap"] * 4)
    assert slow.requests == []


async def test_others_are_asked_where_the_plan_offers_nothing(clock):
    """Providers that take time are asked where `repair` has nothing that can be used."""
    slow = proposer(clock, *replaced("t6", "t7"), after=1)
    strict = {
        "min_llm_confidence": 0.85
    }  # which `repair` does not have in other tools of the same capability
    _, tools, _, _ = await carried_out(dear(), "repair", slow, clock=clock, alternatives=strict)
    assert (len(slow.requests), tools["t6~2"]) == (1, "cheap")


async def test_a_path_outlives_other_replans(clock):
    """A path that was found while a failure was being repaired is taken afterwards, for what has not begun."""

    def propose(request):
        trigger = request.triggers[0]
        if trigger.kind == "better-path-found":
            return []
        return returns(
            alternative(ReplaceTask(task_id=trigger.tasks[0], tasks=(Task(id="b~2", tool="new"),))),
            after=5,
        )

    tasks = [*dear(12).tasks, Task(id="b", tool="new", arguments={"n": 1}, priority=-1)]
    document = plan(*tasks, tools=[*TOOLS[:2], {"name": "new", "cost": 1}])
    script = {"b": raises(ValueError("broken"))}
    slow = ScriptedProvider(propose, clock=clock)
    result, tools, _, engine = await carried_out(
        document, slow, "repair", clock=clock, script=script
    )
    assert result.ok
    assert list(tools.values()).count("cheap") >= 5
    assert not bodies(engine.store, result.run, TriggerDropped)


async def test_repairs_and_better_paths_are_considered_apart(clock):
    """A failure before tasks that could be done better is repaired first, and the better path is taken next."""
    document = dear(9)
    script = {"t3": raises(ValueError("broken"), after=0)}
    result, tools, _, _ = await carried_out(document, "repair", clock=clock, script=script)
    assert result.ok
    assert list(tools.values()) == ["dear"] * 4 + ["cheap"] * 6


REPORT = """
goal: {objective: a report, facts: [artifact(report)]}
facts: [artifact(links)]
resources: {gpu: 0}
tools:
  - {name: fetch, needs: [links], produces: [pages], cost: 4}
  - {name: note, requires: [], adds: [noted]}
  - {name: summarise, needs: [pages], produces: [summary], cost: 3}
  - {name: oracle, needs: [links], produces: [summary], cost: 2, available: false}
  - {name: model, needs: [links], produces: [summary], cost: 2, resources: {gpu: 2}}
  - {name: write, needs: [summary], produces: [report], cost: 1}
  - {name: announce, needs: [report], adds: [announced], cost: 1}
  - {name: begin}
tasks:
  - {id: begin, tool: begin}
  - {id: note, tool: note, depends_on: [begin]}
  - {id: fetch, tool: fetch, depends_on: [note]}
  - {id: summarise, tool: summarise, depends_on: [fetch]}
  - {id: write, tool: write, depends_on: [summarise]}
  - {id: announce, tool: announce, depends_on: [write]}
"""


@pytest.mark.parametrize(
    ("news", "tools"),
    [
        (lambda run: run.observe(holds=["artifact(summary)"]), ["begin", "note", "write", "announce"]),
        (lambda run: run.observe(holds=["artifact(report)"]), ["begin", "note", "announce"]),
        (lambda run: run.observe(holds=["artifact(report)", "announced"]), ["begin", "note"]),
        (lambda run: run.observe(holds=["noted"]), ["begin", "fetch", "summarise", "write", "announce"]),
        (lambda run: run.change_resource("oracle", available=True), ["begin", "note", "oracle", "write", "announce"]),
        (lambda run: run.change_resource("gpu", capacity=2), ["begin", "note", "model", "write", "announce"]),
        (lambda run: run.change_resource("gpu", capacity=1), ["begin", "note", "fetch", "summarise", "write", "announce"]),
    ],
    ids=["effect", "goal", "all effects", "no cost declared", "tool", "resource", "small resource"],
)  # fmt: skip
async def test_shortcuts_over_facts(news, tools, clock):
    """What has become superfluous is left out, and a cheaper way is taken, without what nothing else achieves."""
    settings = Settings.model_validate(
        {"triggers": ("better-path-found",), "better_path": {"min_gain": 0.08}}
    )
    engine = ReplanningEngine(["repair"], settings=settings, environment=environment(clock))
    used = []

    async def work(task, context):
        used.append(task.tool)
        if task.id == "begin":
            news(run)
        await clock.sleep(1)

    async with engine.open(Plan.parse(REPORT)) as run:
        await perform(run, work)
    assert (run.result.ok, used) == (True, tools)


async def test_a_repeated_path_does_not_keep_the_run_open(clock):
    """A better path that waits for its cooldown does not delay the end of a run in which nothing can run any more."""
    script = {"t6": raises(ValueError("broken"))}
    start = clock.now()
    result, _, _, _ = await carried_out(
        dear(9), ScriptedProvider(), clock=clock, script=script, approval={"always_for": ()}
    )
    assert (result.status, clock.now() - start) == ("failed", 6)


@pytest.mark.parametrize("kind", ["context-changed", "human-request"])
async def test_proposals_for_other_reasons_are_trimmed_as_well(kind, clock):
    """What has begun since a person asked is left out of the proposal, and the rest of it is done."""
    settings = Settings.model_validate({"triggers": (kind,)})
    change = [ModifyTask(task_id=f"t{n}", fields={"arguments": {"quick": True}}) for n in range(4)]
    provider = proposer(clock, *change, after=1.5)
    engine = ReplanningEngine([provider], settings=settings, environment=environment(clock))
    work = ScriptedExecutor(clock=clock, default=returns(after=1))
    async with engine.open(dear(4)) as run:
        run.request_replan("faster") if kind == "human-request" else run.change_goal(
            objective="faster"
        )
        await perform(run, work)
    assert [bool(call.task.arguments) for call in work.calls] == [False, False, True, True]


class Thrifty(PlanEvaluator):
    """An evaluator that compares paths as it is told: with a share, an error, or something else."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[tuple[list[str], list[str], float | None]] = []

    def compare(self, one, other, view, total=None) -> float:
        """What it was told to say."""
        ids = [task.id for task in one], [task.id for task in other]
        self.asked.append((*ids, total))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "rejection"),
    [
        (0.9, None),
        (0.01, "it saves 1% of the remaining cost, which is too little"),
        (-2, "it saves -200% of the remaining cost, which is too little"),
    ],
)
async def test_evaluator_compares_better_paths(answer, rejection, clock):
    """An evaluator of one's own decides what a path saves: it gets the tasks that differ, and the cost of what remains."""
    evaluator = Thrifty(answer)
    changes = replaced("t6", "t7")
    result, tools, rejected, engine = await carried_out(
        dear(), proposer(clock, *changes, after=0.5), clock=clock, evaluator=evaluator
    )
    assert evaluator.asked[0] == (["t6", "t7"], ["t6~2", "t7~2"], 50.0)
    assert engine.evaluator is evaluator
    assert (set(rejected), result.problems) == ({rejection} - {None}, ())
    assert ("t7~2" in tools) is (rejection is None)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (ValueError("no idea"), "ValueError('no idea')"),
        ("much", "it returned 'much' instead of a share of the cost"),
        (float("nan"), "it returned nan instead of a share of the cost"),
    ],
    ids=["raises", "wrong", "undefined"],
)
async def test_failing_comparison(answer, problem, clock):
    """An evaluator that cannot compare paths is told of once, and the built-in one decides from then on."""
    evaluator = Thrifty(answer)
    result, tools, _, _ = await carried_out(
        dear(), proposer(clock, *replaced("t6", "t7"), after=0.5), clock=clock, evaluator=evaluator
    )
    assert (len(evaluator.asked), "t7~2" in tools) == (1, True)
    (told,) = result.problems
    assert (told.where, problem in told.error) == ("evaluator", True)
