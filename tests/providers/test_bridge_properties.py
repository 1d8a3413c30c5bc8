"""Repairs over facts in whatever domain and however large: none fails a judge of its own, nor takes too much."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from replanning import (
    Alternative,
    Goal,
    Plan,
    PlanRun,
    ReplanRequest,
    Task,
    ToolSpec,
    open_run,
)
from replanning.changes import AddTask, ModifyTask, PlanChange, RemoveTask, ReplaceTask, SkipTask
from replanning.journal import (
    ContextChanged,
    FactsObserved,
    ResourceChanged,
    TaskFailed,
)
from replanning.live import PlanView
from replanning.providers._planner.bridge import repair_problems
from replanning.providers._planner.domain import Domain, ToolAction, reachable_actions
from replanning.providers._planner.search import Target, find_cheapest_path, solve
from replanning.providers.repair import RepairProvider
from tests.support.live import JournaledPlan, journaled, tool

patient = settings(
    deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
FACTS = [f"f{number}" for number in range(7)]
one = st.lists(st.sampled_from(FACTS), max_size=1).map(tuple)
few = st.lists(st.sampled_from(FACTS), max_size=2, unique=True).map(tuple)


@st.composite
def domains(draw: st.DrawFn) -> tuple[tuple[ToolSpec, ...], frozenset[str]]:
    """Ground tools over a few facts, and what holds at first."""
    tools = tuple(
        ToolSpec(
            name=f"t{number}",
            requires=draw(few | one),
            adds=draw(
                st.lists(st.sampled_from(FACTS), min_size=1, max_size=2, unique=True).map(tuple)
            ),
            removes=draw(one),
            cost=float(draw(st.integers(1, 3))),
        )
        for number in range(draw(st.integers(4, 9)))
    )
    return tools, frozenset(draw(st.lists(st.sampled_from(FACTS), max_size=3, unique=True)))


def after(tool: ToolSpec, facts: frozenset[str]) -> frozenset[str] | None:
    """The judge: what holds after a use of a tool; None where it cannot be used."""
    return (facts - set(tool.removes)) | set(tool.adds) if facts.issuperset(tool.requires) else None


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan that can be carried out one task after another, with dependencies between some of them."""
    tools, facts = draw(domains())
    tasks: list[Task] = []
    now = facts
    for number in range(draw(st.integers(1, 6))):
        able = [tool for tool in tools if after(tool, now) is not None]
        if not able:
            break
        tool = draw(st.sampled_from(able))
        now = after(tool, now) or now
        earlier = [task.id for task in tasks]
        chosen = (
            draw(st.lists(st.sampled_from(earlier), max_size=2, unique=True)) if earlier else []
        )
        tasks.append(Task(id=f"s{number}", tool=tool.name, depends_on=tuple(chosen)))
    assume(tasks)
    reached = [fact for fact in sorted(now) if draw(st.booleans())]
    goal = Goal(objective="test", facts=tuple(reached))
    in_a_row = draw(st.booleans())
    return Plan(
        goal=goal, facts=tuple(sorted(facts)), tools=tools, tasks=tuple(tasks), sequential=in_a_row
    )


def carried_out(
    plan: Plan, done: set[str], facts: frozenset[str]
) -> tuple[frozenset[str], list[str]]:
    """Carry out what is left of a plan document, one task after another as soon as it can be: the end, and what is left."""
    tools = {tool.name: tool for tool in plan.tools}
    left = [
        task for task in sorted(plan.tasks, key=lambda task: task.priority) if task.id not in done
    ]
    finished = set(done)
    while ready := [task for task in left if finished.issuperset(task.depends_on)]:
        able = [task for task in ready if after(tools[task.tool or ""], facts) is not None]
        if not able:
            break
        facts = after(tools[able[0].tool or ""], facts) or frozenset()
        left.remove(able[0])
        finished.add(able[0].id)
    return facts, [task.id for task in left]


async def troubled(
    plan: Plan,
    steps: int,
    ceased: Sequence[str],
    down: str | None,
    *,
    fail: bool,
    goal: Sequence[str] | None,
) -> None:
    """Let something happen to a run, and judge all that is offered then."""
    async with open_run(plan) as run:
        now = _done(run, plan, steps) - set(ceased)
        run.observe(ceased=ceased)
        assert frozenset(run.live.world.facts) == now
        tasks = tuple(entry.id for entry in run.live if entry.state != "DONE")
        triggers: list[object] = [ContextChanged(tasks=tasks, facts=tuple(ceased))]
        if goal is not None:
            run.change_goal(facts=goal)
            triggers.append(
                ContextChanged(tasks=tasks, facts=tuple(f for f in goal if f not in now), goal=True)
            )
        if down is not None:
            run.change_resource(down, available=False)
            triggers.append(ResourceChanged(tasks=tasks, name=down, available=False))
        met = {tool.name for tool in plan.tools if now.issuperset(tool.requires)} - {down}
        ready = [
            entry.id for entry in run.live if entry.state == "READY" and entry.task.tool in met
        ]
        if fail and ready:
            run.failed(run.started(ready[0]), ValueError("broken"))
            triggers.append(TaskFailed(tasks=(ready[0],)))
        view = PlanView(run.live)
        worlds = (view.strips_problem(), view.strips_problem(facts=ceased))
        whole, near = (
            set(world.feasibility().unmet_facts()).intersection(ceased) for world in worlds
        )
        assert near == whole
        request = ReplanRequest(tuple(triggers), view, 3, 1e12)  # type: ignore[arg-type] # triggers of three kinds
        offered = await RepairProvider().propose(request)
        assert offered == await RepairProvider().propose(request)
        for alternative in offered:
            if alternative.reason.startswith(("repair", "plan anew")):
                _judge(run, alternative, now)
        run.pause()


def _done(run: PlanRun, plan: Plan, steps: int) -> frozenset[str]:
    """Carry out the first tasks, in the order of the plan."""
    tools = {tool.name: tool for tool in plan.tools}
    facts = frozenset(plan.facts or ())
    for task in plan.tasks[:steps]:
        run.succeeded(run.started(task.id))
        facts = after(tools[task.tool or ""], facts) or frozenset()
    return facts


def _judge(run: PlanRun, alternative: Alternative, now: frozenset[str]) -> None:
    """Return whether the live plan accepts it, and the result is executable and reaches the goal."""
    assert run.live.check(alternative.changes) == ()
    done = {entry.id for entry in run.live if entry.state in ("DONE", "RUNNING")}
    gone = {c.task_id for c in alternative.changes if isinstance(c, RemoveTask | SkipTask)}
    document = _changed(run.plan, alternative.changes)
    end, left = carried_out(document, done | gone, now)
    assert left == [], (alternative, left)
    assert end.issuperset(run.plan.goal.facts), (alternative, end)
    down = {tool.name for tool in run.live.tools.values() if not tool.available}
    assert not [
        t
        for c in alternative.changes
        if isinstance(c, ReplaceTask)
        for t in c.tasks
        if t.tool in down
    ]


def _changed(plan: Plan, changes: Sequence[PlanChange]) -> Plan:
    """The plan document after changes, made without the library's own machinery."""
    tasks = {task.id: task for task in plan.tasks}
    stands_for: dict[str, str] = {}
    for change in changes:
        if isinstance(change, AddTask):
            tasks[change.task.id] = change.task
            for waiting in change.before:
                tasks[waiting] = _waiting(tasks[waiting], change.task.id)
        elif isinstance(change, ModifyTask):
            tasks[change.task_id] = tasks[change.task_id].model_copy(
                update={"depends_on": tuple(change.fields["depends_on"])}  # type: ignore[arg-type] # they change nothing else
            )
        elif isinstance(change, ReplaceTask):
            old = tasks.pop(change.task_id)
            own = {task.id for task in change.tasks}
            for task in change.tasks:
                root = own.isdisjoint(task.depends_on)
                tasks[task.id] = _waiting(task, *old.depends_on) if root else task
            stands_for[change.task_id] = change.tasks[-1].id
        elif isinstance(change, RemoveTask):
            tasks.pop(change.task_id)
    now = [
        task.model_copy(
            update={"depends_on": tuple(stands_for.get(dep, dep) for dep in task.depends_on)}
        )
        for task in tasks.values()
    ]
    return plan.model_copy(update={"tasks": tuple(now)})


def _waiting(task: Task, *others: str) -> Task:
    return task.model_copy(update={"depends_on": tuple(dict.fromkeys([*task.depends_on, *others]))})


@patient
@given(
    plan=plans(),
    steps=st.integers(0, 4),
    ceased=st.lists(st.sampled_from(FACTS), max_size=3, unique=True),
    data=st.data(),
)
def test_no_offered_repair_fails(plan, steps, ceased, data):
    """A repair that is offered is taken by the live plan, can be carried out, and reaches the goal."""
    down = data.draw(st.none() | st.none() | st.sampled_from([tool.name for tool in plan.tools]))
    fail = data.draw(st.sampled_from([False, False, True]))
    goal = data.draw(st.none() | st.lists(st.sampled_from(FACTS), max_size=2, unique=True))
    trouble = partial(
        troubled, plan, min(steps, len(plan.tasks) - 1), ceased, down, fail=fail, goal=goal
    )
    anyio.run(trouble)


@patient
@given(
    plan=plans(),
    steps=st.integers(0, 4),
    gone=st.booleans(),
    goal=st.lists(st.sampled_from(FACTS), max_size=1),
)
def test_verdicts_are_sound(plan, steps, gone, goal):
    """What is proven unreachable cannot be reached, though a failed call may be used again once its needs are met anew."""
    anyio.run(judged_after_failure, plan, min(steps, len(plan.tasks) - 1), gone, goal)


async def judged_after_failure(plan: Plan, steps: int, gone: bool, goal: Sequence[str]) -> None:
    """Let a task find that facts have ceased and fail, and compare the verdict with breadth-first search."""
    failed = next(tool for tool in plan.tools if tool.name == plan.tasks[steps].tool)
    failed = failed.model_copy(update={"adds": (*failed.adds, "only by this")})
    others = [tool for tool in plan.tools if tool.name != failed.name]
    if failed.requires:
        others.append(ToolSpec(name="anew", adds=failed.requires[:1]))
    fields = {
        "goal": Goal(objective="test", facts=("only by this", *goal)),
        "tools": (failed, *others),
        "tasks": plan.tasks[: steps + 1],
    }
    plan = plan.model_copy(update=fields)
    async with open_run(plan) as run:
        _done(run, plan, steps)
        ready = [plan.tasks[steps].id]
        attempt = run.started(ready[0])
        run.observe(ceased=failed.requires[:1] if gone else ())
        run.failed(attempt, ValueError("broken"))
        offered = await RepairProvider().propose(
            ReplanRequest((TaskFailed(tasks=(ready[0],)),), PlanView(run.live), 3, 1e12)
        )
        now = frozenset(run.live.world.facts)
        judged: list[ToolSpec] = []
        for each in plan.tools:  # the failed call waits for a change of what it needs
            if each is failed:
                judged.append(each.model_copy(update={"requires": (*each.requires, "anew")}))
            else:
                gone_after = set(each.removes) - set(each.adds)
                anew = () if gone_after.isdisjoint(failed.requires) else ("anew",)
                judged.append(each.model_copy(update={"adds": (*each.adds, *anew)}))
        start = now if now.issuperset(failed.requires) else now | {"anew"}
        able = _breadth_first(judged, start, frozenset(plan.goal.facts)) is not None
        verdicts = [alternative.unreachable for alternative in offered if alternative.unreachable]
        assert not (able and "proven-unreachable" in verdicts), (offered, now)
        assert not able or any(alternative.changes for alternative in offered)
        run.pause()


@given(domain=domains(), goal=st.frozensets(st.sampled_from(FACTS), min_size=1, max_size=3))
def test_shortest_way(domain, goal):
    """A* finds a way as short as breadth-first search does, or proves that there is none exactly where that finds none."""
    tools, facts = domain
    actions = [
        ToolAction(
            tool.name,
            {},
            tool.requires,
            tool.adds,
            tuple(f for f in tool.removes if f not in tool.adds),
            1,
        )
        for tool in tools
    ]
    found = find_cheapest_path(facts, [Target(goal, 0)], actions)
    best = _breadth_first(tools, facts, goal)
    assert found.conclusive
    assert (None if found.actions is None else len(found.actions)) == best
    greedy = find_cheapest_path(facts, [Target(goal, 0)], actions, nodes=0)
    assert (greedy.actions is None) == (best is None)


def _breadth_first(
    tools: Sequence[ToolSpec], facts: frozenset[str], goal: frozenset[str]
) -> int | None:
    seen, layer, depth = {facts}, [facts], 0
    while layer:
        if any(state >= goal for state in layer):
            return depth
        following = {
            new for state in layer for tool in tools if (new := after(tool, state)) is not None
        }
        layer = [state for state in following if state not in seen]
        seen.update(layer)
        depth += 1
    return None


LACKING = "part(600)"


def line(length: int) -> JournaledPlan:
    """Steps one after another, of which each needs something of its own that is there from the start."""
    go = tool(
        "go",
        requires=["at({a})", "way({a},{b})", "part({b})"],
        adds=["at({b})"],
        removes=["at({a})"],
    )
    steps = [
        Task(
            id=f"t{n}",
            tool="go",
            arguments={"a": str(n), "b": str(n + 1)},
            depends_on=(f"t{n - 1}",) if n else (),
        )
        for n in range(length)
    ]
    own = [fact for n in range(length) for fact in (f"way({n},{n + 1})", f"part({n + 1})")]
    make = tool("make", parameters={"b": "any"}, adds=["part({b})"])
    return journaled(*steps, tools=[go, make], facts=["at(0)", *own])


def trouble(length: int, lacking: str = LACKING) -> ReplanRequest:
    """Request after the loss of a fact that one step needs."""
    plan = line(length)
    plan.fold(FactsObserved((), (lacking,)))
    trigger = ContextChanged(tasks=tuple(f"t{n}" for n in range(length)), facts=(lacking,))
    return ReplanRequest((trigger,), PlanView(plan.live), 3, 1e12)


async def turns_during(call: Callable[[], Awaitable[object]]) -> int:
    """How often the event loop has its turn during a call."""
    turns = 0

    async def beat() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        await anyio.lowlevel.checkpoint()
        before = turns
        await call()
        found = turns - before
        group.cancel_scope.cancel()
    return found


@pytest.mark.parametrize("length", [700, 1_100])
async def test_turns_of_the_event_loop(length):
    """Of a large plan, what is to be solved is worked out in several turns of the event loop; of a small one in one."""
    request = trouble(length)

    async def pose() -> None:
        assert await repair_problems(request)

    turns = await turns_during(pose)
    assert turns == 0 if length < 1_000 else turns >= 5


@pytest.mark.parametrize("first", ["at({a})", "part({b})"])
def test_uses_of_tools(first):
    """The work of finding the uses of a tool grows with the plan, not with its square, where its needs hang together."""

    def calls(length: int) -> int:
        counted: list[str] = []
        needs = dict.fromkeys([first, "at({a})", "part({b})", "way({a},{b})"])
        go = tool("go", requires=list(needs), adds=["at({b})"])
        facts = [
            f for n in range(length) for f in (f"at({n})", f"part({n + 1})", f"way({n},{n + 1})")
        ]
        sys.setprofile(
            lambda frame, event, argument: counted.append(event) if event == "call" else None
        )
        found = reachable_actions(facts, Domain((go,), {}, {}))
        sys.setprofile(None)
        assert len(found.actions) == length
        return len(counted)

    assert calls(400) < 2.5 * calls(200)


async def test_search_that_is_not_wanted_any_more():
    """A long search in a thread ends when whoever asked has been cancelled, such as at the deadline of the provider."""
    looked = 0

    with anyio.CancelScope() as scope:

        def look() -> None:
            nonlocal looked
            looked += 1
            anyio.from_thread.run_sync(scope.cancel)
            anyio.from_thread.check_cancelled()

        (problem,) = await repair_problems(trouble(700))
        await anyio.to_thread.run_sync(partial(solve, problem, check_cancelled=look))
    assert scope.cancelled_caught
    assert looked == 1
